//! What takes long is done on a thread beside the window: reading the model, compiling kernels, making a pool.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, TryRecvError, channel},
    },
    thread,
};

use eframe::egui;
use example_engine::{
    chat::ChatFormat,
    config::Config,
    frames::FramePool,
    gguf::GgufFile,
    gpu::{Gpu, GpuModel},
    tokenizer::Tokenizer,
};

use crate::{
    pace::MOST_ROWS,
    palette::NUM_OWNERS,
    service::{Language, in_words},
    settings::Settings,
};

/// A model file that has been looked at: everything but its weights.
pub(crate) struct Model {
    pub(crate) file: GgufFile,
    pub(crate) config: Config,
    pub(crate) language: Language,
}

impl Model {
    /// # Errors
    /// What makes it no such model.
    pub(crate) fn read(mut file: GgufFile) -> Result<Self, String> {
        let config = Config::read(&mut file).map_err(in_words)?;
        let tokenizer = Arc::new(Tokenizer::read(&file).map_err(in_words)?);
        let format = ChatFormat::read(&file).map_err(in_words)?;
        Ok(Self { file, config, language: Language { tokenizer, format } })
    }
}

/// Work under way on another thread.
pub(crate) struct Loading<T> {
    result: Receiver<T>,
    done_bytes: Arc<AtomicU64>,
    total_bytes: u64,
}

/// A pool, and what was wrong if it could not be replaced.
pub(crate) type Replaced = (FramePool, Result<(), String>);

impl<T: Send + 'static> Loading<T> {
    /// Does `work` on another thread, or at once unless that may use the device `beside` this one.
    fn start(
        context: &egui::Context,
        beside: bool,
        total_bytes: u64,
        work: impl FnOnce(&AtomicU64) -> T + Send + 'static,
    ) -> Self {
        let (sender, result) = channel();
        let done_bytes = Arc::new(AtomicU64::new(0));
        let (progress, context) = (Arc::clone(&done_bytes), context.clone());
        let run = move || {
            // The window may have been closed meanwhile.
            let _ = sender.send(work(&progress));
            context.request_repaint();
        };
        if beside {
            thread::spawn(run);
        } else {
            run();
        }
        Self { result, done_bytes, total_bytes }
    }

    /// The result, once it is there. `None` inside means that the thread has panicked.
    pub(crate) fn poll(&self) -> Option<Option<T>> {
        match self.result.try_recv() {
            Ok(result) => Some(Some(result)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(None),
        }
    }

    /// How much is done, 0 to 1.
    pub(crate) fn progress(&self) -> f32 {
        self.done_bytes.load(Ordering::Relaxed) as f32 / self.total_bytes.max(1) as f32
    }
}

impl Loading<Result<FramePool, String>> {
    /// Uploads the weights and makes the first pool.
    pub(crate) fn model(
        context: &egui::Context,
        beside: bool,
        gpu: Gpu,
        mut file: GgufFile,
        config: Config,
        settings: Settings,
    ) -> Self {
        Self::start(context, beside, file.tensor_bytes(), move |done| {
            let mut progress = |bytes| done.store(bytes, Ordering::Relaxed);
            let model = GpuModel::load(gpu, &mut file, config.clone(), &mut progress).map_err(in_words)?;
            let cache = settings.cache(&config).map_err(in_words)?;
            FramePool::new(model, cache, MOST_ROWS, NUM_OWNERS as u32).map_err(in_words)
        })
    }
}

impl Loading<Replaced> {
    /// Makes another pool in place of `pool`'s.
    pub(crate) fn replace(
        context: &egui::Context,
        beside: bool,
        mut pool: FramePool,
        settings: Settings,
    ) -> Self {
        Self::start(context, beside, 0, move |_| {
            let cache = settings.cache(pool.config()).map_err(in_words);
            let replaced =
                cache.and_then(|cache| pool.replace(cache, MOST_ROWS, NUM_OWNERS as u32).map_err(in_words));
            (pool, replaced)
        })
    }
}
