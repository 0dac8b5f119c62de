//! Choices between algorithms: they are cached, recorded, and made on noise where GEMMs are large.

use crate::gemms::GemmCase;
use crate::{Copy, TestDevice, gpu_with_cache};
use libtest_mimic::Failed;
use xtrain_cuda::{
    ChoiceKey, CudaError, CudaOutput, CudaTensor, DeviceMemory, DevicePtr, Gemm, GemmChoice, GemmOperands,
    Gpu, Launch, Operands, Work,
};
use xtrain_tensor::host::decode;
use xtrain_tensor::{DType, TensorType};

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

/// Candidates copy their operands to `seen`, which holds those of the last run that was timed.
pub(crate) fn large_gemms_are_timed_on_noise(device: &TestDevice) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let shape = [60, 100];
    let dtypes = [DType::BF16, DType::E4M3, DType::F32, DType::I32];
    let types: Vec<TensorType> = dtypes.iter().map(|&dtype| TensorType::new(dtype, shape)).collect();
    let zeros = || -> Result<DeviceMemory, CudaError> {
        let memory = DeviceMemory::new(&device.context, 60 * 100 * 4)?;
        memory.all().write(&[0; 60 * 100 * 4], &device.stream)?;
        Ok(memory)
    };
    let [operand, timing, out] = [zeros()?, zeros()?, zeros()?];
    let seen: Vec<DeviceMemory> = (0..5).map(|_| zeros()).collect::<Result<_, _>>()?;
    timing.all().write(&7u32.to_le_bytes().repeat(60 * 100), &device.stream)?;
    device.stream.synchronize()?;
    let inputs = |place| types.iter().map(|&ty| CudaTensor { ty, place }).collect::<Vec<_>>();
    let (used, timed) = (inputs(operand.pointer()), inputs(timing.pointer()));
    let ty = TensorType::new(DType::F32, shape);
    let outputs = [CudaOutput { ty, place: out.pointer(), accumulate: true }];
    let of = |inputs| Operands { inputs, outputs: &outputs, workspace: &[] };
    let key = ChoiceKey { text: "copies".into(), former: "copies".into() };
    let copies = |_: &str, operands: &Operands<'_>| -> Result<Work, CudaError> {
        assert!(operands.outputs[0].accumulate);
        let inputs = operands.inputs.iter().map(|input| (input.place, input.ty));
        let tensors = inputs.chain([(operands.outputs[0].place, ty)]).zip(&seen);
        let copy = |((from, ty), to): ((DevicePtr, TensorType), &DeviceMemory)| -> Result<Work, CudaError> {
            let arguments = Copy { from, to: to.pointer(), n: (ty.bytes() / 4) as i32, padding: 0 };
            let function = device.module.function("copy")?;
            // SAFETY: the kernel takes one `Copy`; both tensors have so many words, and outlive the work.
            Ok(unsafe { Work::launch(function, Launch::row(1, 128), arguments) })
        };
        Ok(Work::sequence(tensors.map(copy).collect::<Result<_, _>>()?))
    };
    let found = |n: usize, ty: TensorType| -> Result<Vec<f64>, Failed> {
        Ok(decode(ty, &seen[n].span(0..ty.bytes()).read(&device.stream)?))
    };
    let gpu = gpu_with_cache(folder.path())?;
    let chosen = |flops| gpu.fastest_gemm(&key, flops, &["one", "two"], [&of(&used), &of(&timed)], copies);
    let work = chosen(1e9)?.ok_or("no candidate")?;
    assert!(found(3, types[3])?.iter().all(|&x| x == 7.0), "small ones are timed on the operands for timing");
    assert!(found(0, types[0])?.iter().all(|&x| x.abs() < 1e-30));
    work.enqueue(&device.stream)?;
    device.stream.synchronize()?;
    assert!(found(3, types[3])?.iter().all(|&x| x == 0.0), "the work is that of the operands");
    assert_eq!(gpu.choices().len(), 1);

    let work = chosen(1e10)?.ok_or("no candidate")?;
    assert_eq!(gpu.choices().len(), 2, "a choice on noise is another one");
    for (n, largest) in [(0, 7.0), (1, 448.0)] {
        let values = found(n, types[n])?;
        let deviation = (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt();
        assert!((largest / 8.0..largest / 3.0).contains(&deviation), "{:?}: {deviation}", types[n]);
        assert!(values.iter().all(|x| x.abs() <= largest));
    }
    assert!(found(2, types[2])?.iter().all(|&scale| scale == 1.0));
    assert!(found(3, types[3])?.iter().all(|&x| x == 7.0), "what is no number stays");
    assert!(found(4, ty)?.iter().filter(|&&x| x == 0.0).count() < 10);
    work.enqueue(&device.stream)?;
    device.stream.synchronize()?;
    assert!(found(0, types[0])?.iter().all(|&x| x == 0.0), "the work is that of the operands");
    // Another process times nothing: the choice is cached.
    let again = gpu_with_cache(folder.path())?;
    again.fastest_gemm(&key, 1e10, &["one", "two"], [&of(&used), &of(&timed)], copies)?.ok_or("none")?;
    assert!(found(0, types[0])?.iter().all(|&x| x == 0.0));
    assert!(
        gpu.choices().into_iter().collect::<Vec<_>>().contains(&again.choices().pop_first().ok_or("none")?)
    );
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
