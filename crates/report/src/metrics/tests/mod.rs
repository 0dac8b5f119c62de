//! Promises to readers of the metrics.

mod jsonl;
mod sink;
mod tensorboard;
mod text;

use super::*;
use xtrain_model::Recipe;

/// A step as a small CPU run reports it.
fn step(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 3.4512,
        grad_norm: 0.84,
        lr: 9.98e-4,
        memory_bytes: 450_971_566,
        memory_total_bytes: Some(25 << 30),
        tokens_per_second: 61_234.0,
        trained: None,
        tflops: 0.0396,
        mfu: None,
        tokens: step * 4096,
        epoch: 0.25,
        step_ms: 66.9,
        skipped: 0,
        saturated: None,
        seconds_left: Some(161.0),
    }
}

/// Experts in three blocks, none in the first.
fn experts(step: u64) -> ExpertMetrics {
    ExpertMetrics {
        step,
        balance: 2.031_25,
        z_loss: 4.12,
        blocks: vec![1, 2, 3],
        max_load: vec![1.2, 1.25, 1.32],
        min_tokens: vec![41, 1_234, 50],
        rank_load: Vec::new(),
    }
}

/// The score on a task of 200 rows.
fn task(step: u64) -> TaskMetrics {
    TaskMetrics {
        step,
        task: "capitals".into(),
        metric: "acc_norm".into(),
        value: 0.4125,
        interval: Some([0.346, 0.482]),
        rows: 200,
        chance: 0.25,
    }
}

fn records() -> Vec<Record> {
    let events = [
        Event::from(step(1)),
        StepMetrics {
            mfu: Some(0.41),
            trained: Some(TrainedMetrics { tokens_per_second: 23_269.0, share: 0.38, padding: 0.0047 }),
            saturated: Some(3),
            seconds_left: None,
            memory_total_bytes: None,
            ..step(2)
        }
        .into(),
        EvalMetrics { step: 2, loss: 2.5, bits_per_byte: Some(1.87), token_accuracy: Some(0.43) }.into(),
        EvalMetrics { step: 2, loss: 900.0, ..EvalMetrics::default() }.into(),
        SkippedStep { step: 3, loss: f64::INFINITY, grad_norm: f64::NEG_INFINITY, skipped: 1 }.into(),
        CheckpointSaved { step: 3, path: "runs/ä b/step-3".into() }.into(),
        Resumed::after(3).into(),
        Resumed { step: 3, switched: Some([Recipe::Bf16, Recipe::Fp8Block]) }.into(),
        ReferenceGap { step: 8, steps: 4, loss: 2.002, bf16_loss: 2.0 }.into(),
        ReferenceGap { step: 16, steps: 4, loss: f64::INFINITY, bf16_loss: 2.0 }.into(),
        Sample {
            step: 3,
            prompt: "Once \"upon\"".into(),
            text: "\n a\ttime\u{1b}[2J\u{2028}".into(),
            is_chat: false,
        }
        .into(),
        SourceMetrics {
            step: 3,
            name: "data/ä.jsonl".into(),
            tokens: Some(819_200),
            epoch: Some(0.31),
            train_loss: Some(2.75),
            loss: Some(2.9),
            token_accuracy: Some(0.41),
        }
        .into(),
        SourceMetrics {
            step: 3,
            name: "b.txt".into(),
            loss: Some(f64::INFINITY),
            ..SourceMetrics::default()
        }
        .into(),
        task(3).into(),
        TaskMetrics { interval: None, task: "b\u{1b}".into(), value: f64::NAN, ..task(4) }.into(),
        Warning { step: 3, text: "the loss\u{1b} is high".into() }.into(),
        experts(3).into(),
        ExpertMetrics { balance: f64::INFINITY, z_loss: f64::NEG_INFINITY, ..ExpertMetrics::default() }
            .into(),
    ];
    events
        .into_iter()
        .enumerate()
        .map(|(at, event)| Record { time: 1.5e9 + at as f64 / 4.0, event })
        .collect()
}
