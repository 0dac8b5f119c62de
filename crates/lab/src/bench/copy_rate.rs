//! The bandwidth of a processor's memory, measured by copies.

use rayon::prelude::*;
use std::time::Instant;
use xtrain_cuda::{CudaError, DeviceMemory, Event, Stream};
use xtrain_runtime::EngineError;
use xtrain_step::engine::Processor;

/// Bytes per second, read and written together, of a copy within the memory of `processor`: the median of
/// `repeats` copies.
pub(super) fn copy_rate(processor: &Processor, repeats: usize) -> Result<f64, EngineError> {
    let repeats = repeats.max(1);
    let (bytes, mut seconds) = match processor {
        Processor::Cpu => {
            let bytes = 64 << 20;
            let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
            let mut copy = || {
                let begun = Instant::now();
                to.par_chunks_mut(1 << 20).zip(from.par_chunks(1 << 20)).for_each(|(to, from)| {
                    to.copy_from_slice(from);
                });
                std::hint::black_box(&mut to);
                begun.elapsed().as_secs_f64()
            };
            copy();
            (bytes, (0..repeats).map(|_| copy()).collect::<Vec<f64>>())
        }
        Processor::Cuda(gpu) => {
            // Far more than caches hold.
            let bytes = 1 << 30;
            let context = gpu.context();
            let (from, to) = (DeviceMemory::new(context, bytes)?, DeviceMemory::new(context, bytes)?);
            let stream = Stream::new(context)?;
            from.all().fill(1, &stream)?;
            let (begin, end) = (Event::timed(context)?, Event::timed(context)?);
            let copy = || {
                begin.record(&stream)?;
                to.all().copy_from(from.all(), &stream)?;
                end.record(&stream)?;
                end.synchronize()?;
                begin.seconds_until(&end)
            };
            copy()?;
            (bytes, (0..repeats).map(|_| copy()).collect::<Result<_, CudaError>>()?)
        }
    };
    seconds.sort_by(f64::total_cmp);
    Ok(2.0 * bytes as f64 / seconds[repeats / 2])
}
