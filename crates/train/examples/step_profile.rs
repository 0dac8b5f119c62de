//! Where the time of a training step goes on the CPU, by op and role.
//!
//!     cargo run --release -p xtrain-train --example step_profile -- examples/quickstart.toml [--set section.key=value ...]

use std::path::Path;
use std::sync::Arc;
use xtrain_data::Batch;
use xtrain_model::decoder::io;
use xtrain_program::StateKind;
use xtrain_runtime::{CpuEngine, Engine, Part};
use xtrain_tensor::Philox;
use xtrain_train::config::Config;
use xtrain_train::programs::{self, update_io};
use xtrain_train::run::plan;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let file = args.next().ok_or("name a run file")?;
    let sets: Vec<String> = args.filter(|a| a != "--set").collect();
    let planned = plan(&Config::load(Path::new(&file), &sets)?)?;
    let spec = planned.spec;
    let mut engine = CpuEngine::new(Arc::new(xtrain_ops::registry::cpu_kernels()));
    let id = engine.load(programs::training(&spec)?)?;
    for (site, p) in spec.model.parameters().iter().enumerate() {
        let mut values = vec![0.0f32; p.shape.iter().product()];
        Philox::new(0, 0, site as u32).fill_normal(0.02, &mut values);
        engine.write_state(StateKind::Master, &p.name, bytemuck::cast_slice(&values))?;
    }
    let n = spec.batch.sequences * spec.batch.seq_len;
    let token = |i: usize| (Philox::new(1, 0, 0).word(i as u64) % spec.model.vocab_size as u32) as i32;
    let batch = Batch {
        tokens: (0..n).map(token).collect(),
        targets: (n..2 * n).map(token).collect(),
        positions: (0..n).map(|i| (i % spec.batch.seq_len) as i32).collect(),
        ..Batch::default()
    };
    engine.write_input(id, io::TOKENS, bytemuck::cast_slice(&batch.tokens))?;
    engine.write_input(id, io::TARGETS, bytemuck::cast_slice(&batch.targets))?;
    engine.write_input(id, io::POSITIONS, bytemuck::cast_slice(&batch.positions))?;
    engine.write_input(id, io::INV_TARGETS, bytemuck::bytes_of(&(1.0 / n as f32)))?;
    engine.write_input(id, update_io::LR, bytemuck::bytes_of(&1e-3f32))?;
    let (warm, steps) = (3, 20);
    for step in 0..warm + steps {
        if step == warm {
            engine.start_profile();
        }
        engine.run(id, Part::Whole)?;
    }
    let rows = engine.profile().map(|p| p.rows()).unwrap_or_default();
    let total: f64 = rows.iter().map(|r| r.time.as_secs_f64()).sum();
    println!("{:<28}{:<12}{:>8}{:>12}{:>8}", "op", "role", "runs", "ms a step", "%");
    for r in rows {
        let ms = r.time.as_secs_f64() * 1e3 / steps as f64;
        let share = 100.0 * r.time.as_secs_f64() / total;
        println!("{:<28}{:<12}{:>8}{ms:>12.3}{share:>8.1}", r.op, r.role, r.runs / steps as u64);
    }
    println!("{:<48}{:>12.3}", "total", total * 1e3 / steps as f64);
    Ok(())
}
