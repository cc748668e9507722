//! Requests, admission, preemption, and the plan of each step. Knows no wgpu and no bytes of keys or values.

mod abort;
mod admission;
mod blocks;
mod branch;
mod budget;
mod commit;
mod consistency;
mod cut;
mod events;
mod forget;
mod ledger;
mod line;
mod plan_text;
mod planner;
mod preempt;
mod prefix;
mod promise;
mod request;
mod residency;
mod room;
mod scheduler;
mod sequence;
mod status;
mod step_builder;
mod step_plan;
mod transitions;
mod victims;
mod work_split;

pub use request::{
    Admission, DuplicatePrompts, FinishReason, MissCounts, Preemption, PreemptionMode, PreemptionReason,
    PrefixCacheConfig, PrefixReport, Priority, Rates, Request, RowResult, Schedule, SchedulerConfig,
    SchedulerStats, StepEvent, VictimPolicy, WaitReason,
};
pub use scheduler::Scheduler;
pub use sequence::State as SequenceState;
pub use status::SequenceStatus;
pub use step_builder::StepBuilder;
pub use step_plan::{LogitRow, StackPlan, StepPlan, TableChange, TransferReport};
pub use work_split::{DIRECT, DecodeItem, MergeItem, PrefillItem, RowGroup, SplitConfig, WorkSplit};
