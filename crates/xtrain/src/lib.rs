//! The public face of xtrain: `use xtrain::prelude::*`.
//!
//! The crates behind it hold the logic; this one names what a program that embeds training needs. From a text
//! to a model that continues it:
//!
//! ```
//! use std::ops::ControlFlow;
//! use std::path::Path;
//! use std::sync::atomic::AtomicBool;
//! use xtrain::prelude::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = tempfile::tempdir()?;
//! let place = |name: &str| folder.path().join(name).display().to_string();
//! std::fs::write(place("text.txt"), "to be or not to be, that is the question.\n".repeat(100))?;
//!
//! // A run file; paths are laid over it, so that nothing in them needs quotes.
//! let file = b"
//!     [model]
//!     dim = 16
//!     layers = 1
//!     heads = 2
//!     [data]
//!     tokenizer = 'chars'
//!     seq_len = 16
//!     held_out = 0.0
//!     [optimizer]
//!     lr = 1e-2
//!     [train]
//!     steps = 20
//! ";
//! let text = |option, key, name: &str| Override::Text { option, key, text: place(name) };
//! let paths = [
//!     text("the text", "data.train", "text.txt"),
//!     text("the cache", "data.cache_dir", "cache"),
//!     text("the run folder", "train.out", "run"),
//! ];
//! let run = Config::parse(Path::new("example.toml"), file, &paths)?;
//!
//! // Set from a signal handler, `stop` saves the run and ends it; `()` watches nothing.
//! let stop = AtomicBool::new(false);
//! assert_eq!(train(&run, Start::New, &stop, &mut ())?, Outcome::Finished);
//!
//! let mut model = open(Path::new(&place("run")), Which::Latest, Device::Auto, None)?;
//! let prompt = model.tokenizer.encode_prompt("to be")?;
//! let mut generator = Generator::new(&mut model.weights, prompt.len() + 10)?;
//! let greedy = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
//! let stop_tokens = model.tokenizer.stop_tokens().to_vec();
//! let mut each = |_: GeneratedToken<'_>| ControlFlow::Continue(());
//! let made = generator.generate(&mut model.weights, &prompt, 10, greedy, &stop_tokens, &mut each)?;
//! println!("to be{}", model.tokenizer.decode_after(&prompt, &made, SpecialTokens::Hide)?);
//!
//! // As a Hugging Face folder. The run has left one too, in `run/hf`.
//! let options = ExportOptions { dtype: ExportDtype::Fp32, ..ExportOptions::default() };
//! export(&mut model.weights, &model.identity, &model.tokenizer, Path::new(&place("model")), &options)?;
//! # Ok(())
//! # }
//! ```

/// The items that a program needs to train or run models.
pub mod prelude {
    pub use xtrain_checkpoint::hf::{ExportDtype, ExportOptions};
    pub use xtrain_config::{Config, Device, Override, Parsed};
    pub use xtrain_data::{Dataset, Loader, SpecialTokens, Tokenizer, Validation};
    pub use xtrain_evaluation::loss::Evaluator;
    pub use xtrain_model::{Architecture, Family, Recipe};
    pub use xtrain_program::{Plan, Program, Recompute, Tracer};
    pub use xtrain_report::metrics::Event;
    pub use xtrain_runtime::{CpuEngine, Engine};
    pub use xtrain_step::generate::{GeneratedToken, Generator, Sampling};
    pub use xtrain_step::learner::Learner;
    pub use xtrain_step::weights::Weights;
    pub use xtrain_tensor::{DType, HostTensor, Shape, TensorType};
    pub use xtrain_train::corpus::Notice;
    pub use xtrain_train::error::RunError;
    pub use xtrain_train::eval_data::{TextLoss, TextOptions, text as evaluate_text};
    pub use xtrain_train::exchange::{export, import};
    pub use xtrain_train::open_model::{OpenedModel, Which, open};
    pub use xtrain_train::run::{Observer, Outcome, Start, train};
    pub use xtrain_train::spec::plan;
}

pub use {
    xtrain_checkpoint as checkpoint, xtrain_config as config, xtrain_data as data,
    xtrain_evaluation as evaluation, xtrain_lab as lab, xtrain_model as model, xtrain_ops as ops,
    xtrain_planner as planner, xtrain_program as program, xtrain_rank as rank, xtrain_report as report,
    xtrain_runtime as runtime, xtrain_step as step, xtrain_tensor as tensor, xtrain_train as train,
};
