//! Choices between algorithms: they are cached and recorded.

use crate::gemms::GemmCase;
use crate::{TestDevice, gpu_with_cache};
use libtest_mimic::Failed;
use std::thread;
use xtrain_cuda::{Gemm, GemmChoice, GemmOperands, Gpu};
use xtrain_tensor::DType;

pub(crate) fn the_choice_of_an_algorithm_is_cached(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let case =
        GemmCase::new(device, Gemm::new([256, 384, 512], DType::BF16, [false, true], DType::BF16), true)?;
    let plan = |gpu: &Gpu| case.gemm.plan(gpu, &case.operands());
    let gpu = gpu_with_cache(folder.path())?;
    let first = plan(&gpu)?;
    assert_eq!(first.choice, GemmChoice::Timed);
    let files = || std::fs::read_dir(folder.path()).map(|entries| entries.flatten().collect::<Vec<_>>());
    let file = match &files()?[..] {
        [file] => file.path(),
        files => return Err(format!("{} files instead of one", files.len()).into()),
    };
    for gpu in [&gpu, &gpu_with_cache(folder.path())?] {
        let again = plan(gpu)?;
        assert_eq!((again.choice, again.algorithm), (GemmChoice::Cached, first.algorithm));
    }
    let whole = std::fs::read(&file)?;
    std::fs::write(&file, &whole[..50])?;
    assert_eq!(plan(&gpu_with_cache(folder.path())?)?.choice, GemmChoice::Timed, "it was damaged");
    assert_eq!(std::fs::read(&file)?.len(), whole.len());
    assert_eq!(plan(&gpu_with_cache(folder.path())?)?.choice, GemmChoice::Cached);
    // Another GEMM, and one with other alignments, have their own choices.
    let shifted = GemmOperands { a: case.a.pointer().offset(16), ..case.operands() };
    let shorter = Gemm { m: 255, ..case.gemm };
    let others = [
        case.gemm.accumulate(true).plan(&gpu, &case.operands())?,
        shorter.plan(&gpu, &case.operands())?,
        shorter.plan(&gpu, &shifted)?,
    ];
    assert!(others.iter().all(|other| other.choice == GemmChoice::Timed));
    assert_eq!(files()?.len(), 4);
    Ok(())
}

/// Programs are prepared in new threads, which have no context yet.
pub(crate) fn an_algorithm_is_chosen_in_a_new_thread(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let case =
        GemmCase::new(device, Gemm::new([256, 384, 512], DType::BF16, [false, true], DType::BF16), true)?;
    for expected in [GemmChoice::Timed, GemmChoice::Cached] {
        let gpu = gpu_with_cache(folder.path())?;
        // The thread that opens the library has a context.
        case.gemm.accumulate(true).plan(&gpu, &case.operands())?;
        let plan = || case.gemm.plan(&gpu, &case.operands()).map(|plan| plan.choice);
        let planned = thread::scope(|scope| scope.spawn(plan).join());
        assert_eq!(planned.map_err(|_| "the thread panicked")??, expected);
    }
    Ok(())
}

/// The former key is one that xtrain wrote to `choices.json` when keys were `Debug` output.
pub(crate) fn a_choice_that_an_older_run_recorded_is_used(device: &TestDevice) -> Result<(), Failed> {
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    let case =
        GemmCase::new(device, Gemm::new([256, 384, 512], DType::BF16, [false, true], DType::BF16), true)?;
    let gpu = gpu_with_cache(folders[0].path())?;
    let first = case.gemm.plan(&gpu, &case.operands())?;
    let (key, value) = gpu.choices().pop_first().ok_or("nothing is recorded")?;
    let device = key.split_once(": ").ok_or("the key names no device")?.0;
    let former = format!(
        "{device}: Gemm {{ m: 256, n: 384, k: 512, \
         a: Factor {{ dtype: BF16, transposed: false, stride: 512, scaling: None }}, \
         b: Factor {{ dtype: BF16, transposed: true, stride: 512, scaling: None }}, \
         d: BF16, d_stride: 384, accumulate: false, fast_accumulation: false }}, \
         aligned to [Some(256), Some(256), Some(256), Some(256)] bytes, working in 33554432"
    );
    let resumed = gpu_with_cache(folders[1].path())?;
    resumed.adopt(&[(former, value.clone())].into());
    let again = case.gemm.plan(&resumed, &case.operands())?;
    assert_eq!((again.choice, again.algorithm), (GemmChoice::Cached, first.algorithm));
    assert_eq!(resumed.choices().get(&key), Some(&value), "it is recorded under its current key");
    Ok(())
}
