//! Deliberate faults, one at a time, for this repository's own tests: each breaks an invariant, and a test must say so.
//!
//! A place that can be at fault asks `fault!(Name)`. Without the feature `faults` that is the constant `false`, and nothing
//! else of this file is compiled.

/// Whether this fault is the active one.
#[cfg(feature = "faults")]
macro_rules! fault {
    ($name:ident) => {
        $crate::faults::Fault::$name.is_active()
    };
}

/// Nothing is at fault.
#[cfg(not(feature = "faults"))]
macro_rules! fault {
    ($name:ident) => {
        false
    };
}

#[cfg(feature = "faults")]
pub use active::Fault;

#[cfg(feature = "faults")]
mod active {
    use std::cell::Cell;

    thread_local! {
        static ACTIVE: Cell<Option<Fault>> = const { Cell::new(None) };
    }

    macro_rules! faults {
        ($($name:ident $invariant:literal $doc:literal)*) => {
            /// What is done wrong.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub enum Fault {
                $(#[doc = $doc] $name,)*
            }

            impl Fault {
                /// All of them, in the order of the invariants that they break.
                pub const ALL: &[Self] = &[$(Self::$name),*];

                /// The number of the invariant that it breaks.
                pub fn invariant(self) -> u32 {
                    match self {
                        $(Self::$name => $invariant,)*
                    }
                }
            }
        };
    }

    faults! {
        BlockLeaked 1 "A block that its last holder gives up goes on no list."
        HostSlotLeaked 1 "A slot of the host pool that its last holder gives up is not free."
        ForkUncounted 2 "A fork holds blocks that do not count it."
        ReleasedTwice 2 "A table releases its last block twice."
        SharedBlockWritten 3 "A shared last block is written in place."
        LastHolderCopies 3 "The last holder of a block copies it before it writes."
        ForkKeepsLength 4 "A fork is as long as its parent."
        CopySourceNotHeld 5 "The source of a copy may be allocated in the same step."
        CopiesAfterAppends 5 "The device copies blocks when the step's tokens are written already."
        SwapOutsAfterAppends 5 "The device moves blocks out when the step's tokens are written already."
        ReturnsBeforeArrival 5 "A sequence returns from the host pool before it has arrived there."
        HitUnverified 6 "A hit compares hashes only."
        RegisteredWhenPlanned 6 "Blocks can be found as soon as they are planned."
        InvalidRemembered 6 "What an invalid sequence computed is found by others."
        NamespaceIgnored 6 "All namespaces share blocks."
        LostBlocksFound 6 "The prefix cache keeps what lay on a lost device."
        FullHitComputesNothing 6 "A hit may cover the last token."
        RefusedDraftsStay 7 "A commit leaves the rows of refused drafts in their table."
        DraftsCountedIn 7 "A commit counts rows of refused drafts as computed."
        HitNotPromised 8 "Blocks found in the prefix cache are not promised."
        CopyNotPromised 8 "The copies of shared last blocks are not promised."
        WindowSharingPromised 8 "What tables share in a window is promised to them once."
        LostSharingPromised 8 "After a lost device each is promised what was promised when blocks were shared."
        PreemptedWithoutBound 9 "No sequence is ever at the bound of preemptions."
        VictimsFreeTooLittle 9 "Victims are spared although one more block is needed."
        AdmittedAfterPreempting 9 "Others are let in by a step that preempted."
        NoLastResort 9 "A step without rows gives up."
        MaximumUnchecked 10 "A request may be longer than a table."
        SlotShared 11 "Two neighbours of a sequence have one slot."
        OtherStacksTable 11 "The entries of all stacks' tables are sent as the first stack's."
        RollbackKeepsLength 12 "A rolled back table stays as long as it was planned."
        RollbackKeepsCopy 12 "A rolled back table keeps its copy of a shared block."
        DroppedEntriesNotSent 12 "Table entries of a dropped plan count as sent."
        WindowGivesTooMuch 15 "A window gives back one block too many."
        WindowOfPlannedLength 15 "Windows give back blocks when a step ends, on the length that was planned."
        FirstTokensPass 15 "The first tokens go with the window."
        HitLacksWindow 15 "A hit is taken although a window lacks a block of it."
        BehindWindowShared 15 "Tables are cut, and shared, to where a window has left something behind."
        WindowKeepsAll 15 "What a window has left behind is not given back."
        ReturnTakesSlots 15 "A window that comes back takes its slots of the host pool from all that hold them."
    }

    impl Fault {
        /// Makes this fault on this thread from now on, instead of any other; `None` for no fault.
        pub fn activate(fault: Option<Self>) {
            ACTIVE.set(fault);
        }

        /// Whether it is made on this thread.
        pub fn is_active(self) -> bool {
            ACTIVE.get() == Some(self)
        }
    }
}
