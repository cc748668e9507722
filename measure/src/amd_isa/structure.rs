//! Loops and other stretches of the assembly: which of them is the loop over full tiles, how often its inner loops run,
//! and where it stages block-table entries. What does not look like the kernels is an error.

use super::assembly::Block;
use crate::Failure;

/// Loads of 16 bytes a lane, and what they are for, in a full tile of keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileLoads {
    /// Keys of the tile.
    pub(super) keys: u32,
    /// Loads of keys.
    pub(super) k_loads: u32,
    /// Loads of values.
    pub(super) v_loads: u32,
    /// One tile in this many stages block-table entries.
    pub(super) tiles_per_staging: u32,
}

/// Blocks `first..=last`: a loop, whose last block leads back to its first, or what a branch leads past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) first: usize,
    pub(super) last: usize,
}

impl Stretch {
    pub(super) fn has(self, index: usize) -> bool {
        (self.first..=self.last).contains(&index)
    }

    fn holds(self, other: Self) -> bool {
        self != other && self.has(other.first) && self.has(other.last)
    }
}

/// A branch, by indices of blocks.
#[derive(Clone, Copy, Debug)]
struct Branch {
    from: usize,
    to: usize,
    /// Taken by the whole wave or not at all, for a scalar condition.
    is_uniform: bool,
}

pub(super) struct Structure<'a> {
    blocks: &'a [Block],
    branches: Vec<Branch>,
    loops: Vec<Stretch>,
}

impl<'a> Structure<'a> {
    pub(super) fn new(blocks: &'a [Block]) -> Result<Self, Failure> {
        let mut branches = Vec::new();
        for (from, block) in blocks.iter().enumerate() {
            for instruction in &block.instructions {
                let Some(target) = instruction.target else { continue };
                let to = blocks.iter().position(|block| block.label == target);
                let to = to.ok_or_else(|| format!("a branch to BB{target}, which is nowhere"))?;
                let is_uniform = instruction.mnemonic.starts_with("s_cbranch_scc");
                branches.push(Branch { from, to, is_uniform });
            }
        }
        let mut loops: Vec<Stretch> = Vec::new();
        for &Branch { from: last, to: first, .. } in branches.iter().filter(|branch| branch.to <= branch.from)
        {
            match loops.iter_mut().find(|known| known.first == first) {
                Some(known) => known.last = known.last.max(last),
                None => loops.push(Stretch { first, last }),
            }
        }
        let crossing = |a: &Stretch, b: &Stretch| a.first < b.first && b.first <= a.last && a.last < b.last;
        if loops.iter().any(|a| loops.iter().any(|b| crossing(a, b))) {
            return Err("loops that cross".into());
        }
        loops.sort_by_key(|one| one.first);
        Ok(Self { blocks, branches, loops })
    }

    /// The first of the two outermost loops that load keys and values; the second is over the ragged rest.
    pub(super) fn full_tiles(&self) -> Result<Stretch, Failure> {
        let is_outermost = |one: &Stretch| !self.loops.iter().any(|other| other.holds(*one));
        let outermost = self.loops.iter().copied().filter(is_outermost);
        let tile_loops: Vec<Stretch> = outermost.filter(|one| self.loads_in(*one, &[]) > 0).collect();
        let &[full, _ragged] = tile_loops.as_slice() else {
            return Err(format!("{} loops over tiles instead of two", tile_loops.len()).into());
        };
        self.check_entry(full)?;
        Ok(full)
    }

    /// A loop that is entered in its middle is not what its blocks say.
    fn check_entry(&self, one: Stretch) -> Result<(), Failure> {
        let is_wrong =
            |branch: &Branch| !one.has(branch.from) && one.has(branch.to) && branch.to != one.first;
        match self.branches.iter().any(is_wrong) {
            true => Err("a loop over tiles that is entered in its middle".into()),
            false => Ok(()),
        }
    }

    /// Loads of 16 bytes in the loop, those within `except` left out.
    fn loads_in(&self, one: Stretch, except: &[Stretch]) -> u32 {
        let indices = (one.first..=one.last).filter(|index| !except.iter().any(|other| other.has(*index)));
        let instructions = indices.flat_map(|index| &self.blocks[index].instructions);
        instructions.filter(|instruction| matches!(instruction.bytes_loaded(), Ok(16))).count() as u32
    }

    /// What a tile runs that stages block-table entries, the only loads of a lane that are not of 16 bytes: the smallest
    /// stretch with all of them that a uniform branch leads past. None where there are none, as in the contiguous twin.
    pub(super) fn staging(&self, full: Stretch) -> Result<Option<Stretch>, Failure> {
        let loads_entry = |index: &usize| {
            let mut instructions = self.blocks[*index].instructions.iter();
            instructions.any(|instruction| !matches!(instruction.bytes_loaded(), Ok(0 | 16)))
        };
        let entries: Vec<usize> = (full.first..=full.last).filter(loads_entry).collect();
        if entries.is_empty() {
            return Ok(None);
        }
        let forward = self.branches.iter().filter(|branch| branch.is_uniform && branch.from + 1 < branch.to);
        let passed = forward.map(|branch| Stretch { first: branch.from + 1, last: branch.to - 1 });
        let is_staging = |one: &Stretch| full.holds(*one) && entries.iter().all(|entry| one.has(*entry));
        let staging = passed.filter(is_staging).min_by_key(|one| one.last - one.first);
        let staging = staging.ok_or("block-table entries that are loaded for every tile")?;
        match self.loads_in(staging, &[]) {
            0 => Ok(Some(staging)),
            loads => Err(format!("{loads} loads of keys and values where block-table entries are").into()),
        }
    }

    /// How often the loops within `full` run in a tile.
    pub(super) fn trips(&self, full: Stretch, loads: TileLoads) -> Result<Vec<(Stretch, u32)>, Failure> {
        let inner: Vec<Stretch> = self.loops.iter().copied().filter(|one| full.holds(*one)).collect();
        if inner.iter().any(|one| inner.iter().any(|other| one.holds(*other))) {
            return Err("loops within the loops of a tile".into());
        }
        let outside = self.loads_in(full, &inner);
        let all = loads.k_loads + loads.v_loads;
        let trips = |one: Stretch, wanted: Option<u32>| {
            let each = self.loads_in(one, &[]);
            match wanted {
                Some(wanted) if each > 0 && wanted > 0 && wanted % each == 0 => Ok((one, wanted / each)),
                _ => Err(format!("an inner loop of {each} loads, {outside} outside, in a tile of {all}")),
            }
        };
        Ok(match *inner.as_slice() {
            [] if outside == all => Vec::new(),
            [] => return Err(format!("{outside} loads in a tile of {all}").into()),
            [one] => vec![trips(one, all.checked_sub(outside))?],
            // Keys come before values, and nothing lies outside.
            [keys, values] if outside == 0 => {
                vec![trips(keys, Some(loads.k_loads))?, trips(values, Some(loads.v_loads))?]
            }
            _ => return Err(format!("{} inner loops, and {outside} loads outside", inner.len()).into()),
        })
    }
}
