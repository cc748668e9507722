//! What is measured while a layout of memory serves the day.

/// The pool after a step, in tokens (slots). What is not named is free.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PoolUse {
    pub(crate) capacity: u64,
    /// Slots that hold a token that will be read, each once.
    pub(crate) live: u64,
    /// The rest of sequences' last blocks.
    pub(crate) internal: u64,
    /// Set aside for tokens that are still to come.
    pub(crate) later: u64,
    /// Set aside for tokens that will never come: declared, but more than the answer has in the end.
    pub(crate) never: u64,
    /// Tokens of sequences that have ended, in memory that no other may take.
    pub(crate) ended: u64,
    /// In blocks without a holder, whose tokens are known if they are asked for; free to be taken.
    pub(crate) cached: u64,
    /// Slots that would be taken if nothing were shared.
    pub(crate) unshared: u64,
    /// Slots in sequences' blocks or extents.
    pub(crate) held: u64,
    pub(crate) residents: u64,
    /// Whether the first in line waits for memory.
    pub(crate) waiting: bool,
}

impl PoolUse {
    pub(crate) fn free(&self) -> u64 {
        self.capacity - self.taken()
    }

    /// Free, cached blocks included, but of no use to the first in line.
    pub(crate) fn external(&self) -> u64 {
        if self.waiting { self.free() } else { 0 }
    }

    /// Cached, and in nobody's way.
    fn cached(&self) -> u64 {
        if self.waiting { 0 } else { self.cached }
    }

    fn taken(&self) -> u64 {
        self.live + self.internal + self.later + self.never + self.ended
    }
}

/// Sums over steps.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub(crate) steps: u64,
    pub(crate) capacity: u64,
    pub(crate) live: u64,
    pub(crate) internal: u64,
    pub(crate) later: u64,
    pub(crate) never: u64,
    pub(crate) ended: u64,
    pub(crate) cached: u64,
    pub(crate) external: u64,
    pub(crate) unshared: u64,
    pub(crate) held: u64,
    pub(crate) residents: u64,
}

impl Sums {
    fn add(&mut self, steps: u64, pool: &PoolUse) {
        self.steps += steps;
        self.capacity += steps * pool.capacity;
        self.live += steps * pool.live;
        self.internal += steps * pool.internal;
        self.later += steps * pool.later;
        self.never += steps * pool.never;
        self.ended += steps * pool.ended;
        self.cached += steps * pool.cached();
        self.external += steps * pool.external();
        self.unshared += steps * pool.unshared;
        self.held += steps * pool.held;
        self.residents += steps * pool.residents;
    }

    /// Share of the pool that `tokens` are.
    pub(crate) fn of_pool(&self, tokens: u64) -> f64 {
        ratio(tokens, self.capacity)
    }

    /// Of all memory that is not free for the next one, the share that holds live tokens.
    pub(crate) fn live_share(&self) -> f64 {
        let wasted = self.internal + self.later + self.never + self.ended + self.external;
        ratio(self.live, self.live + wasted)
    }

    /// Share of memory that sharing saves.
    pub(crate) fn shared(&self) -> f64 {
        1.0 - ratio(self.held, self.unshared)
    }

    pub(crate) fn internal_per_sequence(&self) -> f64 {
        ratio(self.internal, self.residents)
    }

    pub(crate) fn residents_mean(&self) -> f64 {
        ratio(self.residents, self.steps)
    }
}

pub(crate) fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

/// What a server counts itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    /// Requests that waited for memory, first in line, while the sum of what was free would have done.
    pub(crate) refused_with_room: u64,
    /// Prompt tokens computed for the first time.
    pub(crate) prompt_tokens: u64,
    pub(crate) copied_tokens: u64,
    pub(crate) preemptions: u64,
    /// Those of jobs that nobody waits for.
    pub(crate) idle_preemptions: u64,
    pub(crate) recomputed_tokens: u64,
    /// Sequences moved to the host pool, and back.
    pub(crate) swaps_out: u64,
    pub(crate) swaps_in: u64,
    /// Both ways.
    pub(crate) moved_bytes: u64,
    /// Tokens found in the prefix cache, of those looked for.
    pub(crate) hit_tokens: u64,
    pub(crate) wanted_tokens: u64,
}

/// One layout's day.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    day: u64,
    pub(crate) over_day: Sums,
    /// The steps of the day in which somebody waited for memory.
    pub(crate) while_waiting: Sums,
    /// The day in [`PARTS`](Self::PARTS) parts, for the picture.
    pub(crate) parts: Vec<Sums>,
    pub(crate) residents_peak: u64,
    /// Steps until the last answer ended.
    pub(crate) steps: u64,
    /// Of chats, and of jobs that nobody waits for.
    pub(crate) first_token_steps: [Vec<u64>; 2],
    pub(crate) finished: u64,
    pub(crate) stopped: u64,
    pub(crate) left: u64,
    pub(crate) counters: Counters,
}

impl Record {
    pub(crate) const PARTS: u64 = 240;

    pub(crate) fn new(day: u64) -> Self {
        Self {
            day,
            over_day: Sums::default(),
            while_waiting: Sums::default(),
            parts: vec![Sums::default(); Self::PARTS as usize],
            residents_peak: 0,
            steps: 0,
            first_token_steps: Default::default(),
            finished: 0,
            stopped: 0,
            left: 0,
            counters: Counters::default(),
        }
    }

    /// Notes that the pool was like this for `steps` steps from `step` on. Averages are over the day; answers after its
    /// end still count.
    pub(crate) fn add(&mut self, step: u64, steps: u64, pool: &PoolUse) {
        self.residents_peak = self.residents_peak.max(pool.residents);
        self.steps = step + steps;
        let steps = self.day.saturating_sub(step).min(steps);
        self.over_day.add(steps, pool);
        if pool.waiting {
            self.while_waiting.add(steps, pool);
        }
        for step in step..step + steps {
            self.parts[(step * Self::PARTS / self.day) as usize].add(1, pool);
        }
    }

    /// Steps to the first token that `share` of the chats did not exceed.
    pub(crate) fn first_token(&self, share: f64) -> u64 {
        quantile(&self.first_token_steps[0], share)
    }

    /// And of the jobs that nobody waits for.
    pub(crate) fn idle_first_token(&self, share: f64) -> u64 {
        quantile(&self.first_token_steps[1], share)
    }
}

fn quantile(steps: &[u64], share: f64) -> u64 {
    let mut steps = steps.to_vec();
    steps.sort_unstable();
    let place = (steps.len() as f64 * share) as usize;
    steps.get(place.min(steps.len().saturating_sub(1))).copied().unwrap_or(0)
}
