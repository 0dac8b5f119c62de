//! Facts that must be equal on all ranks.

use super::ProcessGroup;
use crate::corpus::Corpus;
use crate::error::RunError;
use serde_json::json;
use std::collections::HashMap;
use xtrain_config::Config;
use xtrain_program::Parallel;
use xtrain_step::engine::Processor;
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

/// Keys that each rank may set for itself: its paths, and its threads, on which no result depends.
const OWN_KEYS: [&str; 3] = ["train.threads", "train.started_in", "data.cache_dir"];

/// Named values that must be equal on all ranks.
pub(crate) struct Facts(Vec<(String, String)>);

impl Facts {
    /// The facts of a run whose settings are chosen.
    pub(crate) fn collect(
        config: &Config,
        spec: &TrainingSpec,
        corpus: &Corpus,
        processor: &Processor,
    ) -> Result<Facts, RunError> {
        let mut facts = Facts(Vec::new());
        facts.0.extend(settings(config));
        facts.put("tokenizer", corpus.tokenizer.hash_hex());
        facts.put("training data", json!(corpus.loader.state(0).sources).to_string());
        let validation = corpus.validation.as_ref().map(|validation| validation.fingerprints());
        facts.put("validation data", json!(validation).to_string());
        facts.0.extend(processor.identity().into_iter().map(|(name, value)| (name.to_owned(), value)));
        // The rows of a rank are no part of what it computes. A stage of a pipeline has a program of its own.
        for first in spec.parallel.pipeline_groups().ranks(0) {
            let parallel = Parallel { rank: spec.parallel.rank.with_index(first), ..spec.parallel };
            let program = programs::training(&TrainingSpec { parallel, ..spec.clone() });
            let program = program.map_err(LearnError::from)?.to_string();
            facts
                .put("program of a step", format!("{:016x}", xxhash_rust::xxh3::xxh3_64(program.as_bytes())));
        }
        Ok(facts)
    }

    fn put(&mut self, name: &str, value: String) {
        self.0.push((name.to_owned(), value));
    }
}

/// The keys of the configuration, by their names.
fn settings(config: &Config) -> impl Iterator<Item = (String, String)> {
    let sections = json!(config);
    let mut settings = Vec::new();
    for (section, keys) in sections.as_object().into_iter().flatten() {
        for (key, value) in keys.as_object().into_iter().flatten() {
            settings.push((format!("{section}.{key}"), value.to_string()));
        }
    }
    settings.into_iter().filter(|(key, _)| !OWN_KEYS.contains(&key.as_str()))
}

impl ProcessGroup {
    /// Compares the run files of all ranks, with what the command lines change in them.
    ///
    /// # Errors
    /// A key differs.
    pub fn compare_files(&self, config: &Config) -> Result<(), RunError> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        let settings: Vec<_> = settings(config).collect();
        Ok(ranks.control.handshake(&settings)?)
    }

    /// Compares options of the command line, by their names.
    ///
    /// # Errors
    /// An option differs.
    pub fn compare_options(&self, options: &[(String, String)]) -> Result<(), RunError> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        Ok(ranks.control.handshake(options)?)
    }

    /// Compares facts of all ranks, and refuses GPUs that several ranks use, unless the variable by which
    /// NCCL 2.30.3 and newer allow it is set.
    ///
    /// # Errors
    /// A fact differs from that of rank 0: the line names the rank, its host, the fact and both values.
    pub(crate) fn compare(&self, facts: &Facts, processor: &Processor) -> Result<(), RunError> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        ranks.control.handshake(&facts.0)?;
        let own = processor.serial_number().unwrap_or_default();
        let all = ranks.control.gather(own.as_bytes())?;
        let mut users: HashMap<(&str, &[u8]), usize> = HashMap::new();
        let hosts = ranks.control.hosts();
        let may_share = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
        for (rank, (gpu, host)) in all.iter().zip(&hosts).enumerate().filter(|(_, (gpu, _))| !gpu.is_empty())
        {
            if let Some(other) = users.insert((host, gpu), rank).filter(|_| !may_share) {
                return Err(RunError::Refused(format!(
                    "ranks {other} and {rank} on {host} use the same GPU ({}); give each a GPU of its own, and check \
                     CUDA_VISIBLE_DEVICES",
                    String::from_utf8_lossy(gpu)
                )));
            }
        }
        self.barrier()
    }
}
