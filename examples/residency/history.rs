//! How full the pool was, step by step.

use std::collections::VecDeque;

use crate::snapshot::Usage;

/// Steps that are remembered.
pub(crate) const LEN: usize = 480;

/// The last [`LEN`] steps, the oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    samples: VecDeque<Usage>,
}

impl History {
    pub(crate) fn push(&mut self, usage: Usage) {
        if self.samples.len() == LEN {
            self.samples.pop_front();
        }
        self.samples.push_back(usage);
    }

    pub(crate) fn samples(&self) -> impl ExactSizeIterator<Item = &Usage> {
        self.samples.iter()
    }
}

impl Usage {
    /// Live, waste, cached, free, from the bottom up, each as the share of the pool at which it ends.
    pub(crate) fn levels(&self) -> [f32; 4] {
        let all = (self.live + self.waste + self.cached + self.free).max(1) as f32;
        let mut sum = 0;
        [self.live, self.waste, self.cached, self.free].map(|part| {
            sum += part;
            sum as f32 / all
        })
    }
}
