//! candle-transformers as the engine; `engine_mlx.py` describes the protocol.
//!
//! ```text
//! exchange-candle REQUEST.json RESPONSE.json
//! ```
//!
//! Every config.json goes through candle's own types, so that a key that candle insists on and an export
//! lacks is found.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, mistral, mixtral, qwen2, qwen3, qwen3_moe};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::error::Error;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(Deserialize)]
struct Request {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    folder: PathBuf,
    dtype: String,
    prompt: Vec<u32>,
    forced: Vec<u32>,
}

#[derive(Serialize)]
struct Response {
    engine: &'static str,
    runs: Vec<Answer>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Logits(Vec<Vec<f32>>),
    Error(String),
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, request, response] = arguments.as_slice() else {
        return Err("usage: exchange-candle REQUEST.json RESPONSE.json".into());
    };
    let request: Request = serde_json::from_str(&std::fs::read_to_string(request)?)?;
    // candle's llama panics where a tensor does not fit.
    let runs = request.runs.iter().map(|run| match catch_unwind(|| answer(run)) {
        Ok(Ok(logits)) => Answer::Logits(logits),
        Ok(Err(error)) => Answer::Error(error.to_string()),
        Err(_) => Answer::Error("it panicked".into()),
    });
    let response_json =
        serde_json::to_string(&Response { engine: "candle-transformers 0.11.1", runs: runs.collect() })?;
    Ok(std::fs::write(response, response_json)?)
}

fn answer(run: &Run) -> Result<Vec<Vec<f32>>> {
    let mut model = Model::open(&run.folder, &run.dtype)?;
    let mut given = run.prompt.clone();
    let mut position = 0;
    let mut rows = Vec::with_capacity(run.forced.len());
    for &token in &run.forced {
        let tokens = Tensor::new(given.as_slice(), &Device::Cpu)?.unsqueeze(0)?;
        let logits = model.forward(&tokens, position)?;
        rows.push(logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?);
        position += given.len();
        given = vec![token];
    }
    Ok(rows)
}

enum Model {
    Llama(llama::Llama, llama::Cache),
    Mistral(mistral::Model),
    Mixtral(mixtral::Model),
    Qwen2(qwen2::ModelForCausalLM),
    Qwen3(qwen3::ModelForCausalLM),
    Qwen3Moe(qwen3_moe::ModelForCausalLM),
}

impl Model {
    fn open(folder: &Path, dtype: &str) -> Result<Self> {
        let text = std::fs::read_to_string(folder.join("config.json"))?;
        let config: serde_json::Value = serde_json::from_str(&text)?;
        let dtype = match (dtype, config["torch_dtype"].as_str()) {
            ("native", Some("bfloat16")) => DType::BF16,
            _ => DType::F32,
        };
        let files = weight_files(folder)?;
        let tensors = files.iter().try_fold(std::collections::HashMap::new(), |mut all, file| {
            all.extend(candle_core::safetensors::load(file, &Device::Cpu)?);
            Ok::<_, candle_core::Error>(all)
        })?;
        let weights = VarBuilder::from_tensors(tensors, dtype, &Device::Cpu);
        Ok(match config["model_type"].as_str() {
            Some("llama") => {
                let parsed: llama::LlamaConfig = serde_json::from_str(&text)?;
                let parsed = parsed.into_config(false);
                let cache = llama::Cache::new(true, dtype, &parsed, &Device::Cpu)?;
                Model::Llama(llama::Llama::load(weights, &parsed)?, cache)
            }
            Some("mistral") => Model::Mistral(mistral::Model::new(&serde_json::from_str(&text)?, weights)?),
            Some("mixtral") => {
                // candle insists on a window, which no file of this family has, and on a switch of its own.
                let mut config = config;
                config["sliding_window"] = config["max_position_embeddings"].clone();
                config["use_flash_attn"] = false.into();
                Model::Mixtral(mixtral::Model::new(&serde_json::from_value(config)?, weights)?)
            }
            Some("qwen3_moe") => {
                Model::Qwen3Moe(qwen3_moe::ModelForCausalLM::new(&serde_json::from_str(&text)?, weights)?)
            }
            Some("qwen2") => {
                Model::Qwen2(qwen2::ModelForCausalLM::new(&serde_json::from_str(&text)?, weights)?)
            }
            Some("qwen3") => {
                Model::Qwen3(qwen3::ModelForCausalLM::new(&serde_json::from_str(&text)?, weights)?)
            }
            other => return Err(format!("no model for model_type {other:?}").into()),
        })
    }

    fn forward(&mut self, tokens: &Tensor, position: usize) -> candle_core::Result<Tensor> {
        match self {
            Model::Llama(model, cache) => model.forward(tokens, position, cache),
            Model::Mistral(model) => model.forward(tokens, position),
            Model::Mixtral(model) => model.forward(tokens, position),
            Model::Qwen2(model) => model.forward(tokens, position),
            Model::Qwen3(model) => model.forward(tokens, position),
            Model::Qwen3Moe(model) => model.forward(tokens, position),
        }
    }
}

/// The files that the index names, or the single one.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        return Ok(vec![folder.join("model.safetensors")]);
    }
    let index: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(index)?)?;
    let map = index["weight_map"].as_object().ok_or("the index has no weight_map")?;
    let names: BTreeSet<&str> = map.values().filter_map(|v| v.as_str()).collect();
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}
