//! What needs a card. Without one every test counts as ignored, and the reason is printed.
#![allow(unsafe_code, reason = "it launches kernels")]

use libtest_mimic::{Arguments, Failed, Trial};
use xtrain_cuda::{
    Arch, Compiler, Context, CudaError, Device, DeviceMemory, DevicePtr, Event, Graph, KernelCache, Launch,
    Module, PinnedMemory, Stream,
};

const KERNELS: &str = r#"
struct Scale { float* x; float by; int n; };
extern "C" __global__ void scale(Scale a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n) a.x[i] *= a.by;
}
// Each block writes its rank within its cluster.
struct Ranks { unsigned* rank; };
extern "C" __global__ void ranks(Ranks a) {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) a.rank[blockIdx.x] = rank;
}
"#;

#[derive(Clone, Copy)]
#[repr(C)]
struct Scale {
    x: DevicePtr,
    by: f32,
    n: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Ranks {
    rank: DevicePtr,
}

struct Card {
    context: Context,
    stream: Stream,
    module: Module,
    arch: Arch,
}

impl Card {
    fn new() -> Result<Card, CudaError> {
        let device = Device::at(0)?;
        let context = Context::new(device)?;
        let arch = device.info()?.arch;
        let cubin = Compiler::open()?.compile("test.cu", KERNELS, arch, &[])?.cubin;
        Ok(Card { stream: Stream::new(&context)?, module: Module::load(&context, &cubin)?, context, arch })
    }

    fn floats(&self, values: &[f32]) -> Result<DeviceMemory, CudaError> {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let memory = DeviceMemory::new(&self.context, bytes.len())?;
        memory.span(0..bytes.len()).write(&bytes, &self.stream)?;
        Ok(memory)
    }

    fn read(&self, memory: &DeviceMemory) -> Result<Vec<f32>, CudaError> {
        let bytes = memory.span(0..memory.bytes()).read(&self.stream)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    fn scale(&self, memory: &DeviceMemory, by: f32) -> Result<(), CudaError> {
        let n = memory.bytes() / 4;
        let arguments = Scale { x: memory.pointer(), by, n: n as i32 };
        let function = self.module.function("scale")?;
        // SAFETY: the kernel takes one `Scale`, and writes the n numbers of `memory`, which the tests keep until they read it.
        unsafe { function.launch(Launch::row((n as u32).div_ceil(128), 128), &arguments, &self.stream) }
    }
}

fn a_card_describes_itself(card: &Card) -> Result<(), Failed> {
    let info = card.context.device().info()?;
    eprintln!("{info:?}, driver {}", Device::driver_version()?);
    assert!(info.multiprocessors > 0 && info.memory_bytes > 1 << 30 && info.memory_bandwidth > 1e11);
    let (free, total) = card.context.memory()?;
    assert!(free > 0 && free <= total);
    Ok(())
}

fn bytes_come_back_as_they_went(card: &Card) -> Result<(), Failed> {
    let source: Vec<u8> = (0..100_003u32).map(|i| (i * 7 + i / 251) as u8).collect();
    let memory = DeviceMemory::new(&card.context, source.len())?;
    memory.span(0..source.len()).write(&source, &card.stream)?;
    assert_eq!(memory.span(0..source.len()).read(&card.stream)?, source);
    assert_eq!(memory.span(17..1000).read(&card.stream)?, source[17..1000]);
    let copy = DeviceMemory::new(&card.context, 50)?;
    copy.span(0..50).fill(0xA5, &card.stream)?;
    copy.span(3..13).copy_from(memory.span(100..110), &card.stream)?;
    let mut pinned = PinnedMemory::new(&card.context, 64)?;
    copy.span(0..50).read_into(&mut pinned, 7, &card.stream)?;
    card.stream.synchronize()?;
    assert_eq!((pinned[6], pinned[7], pinned[57]), (0, 0xA5, 0));
    assert_eq!(pinned[10..20], source[100..110]);
    Ok(())
}

fn a_kernel_computes(card: &Card) -> Result<(), Failed> {
    let values: Vec<f32> = (0..1001).map(|i| i as f32).collect();
    let memory = card.floats(&values)?;
    card.scale(&memory, 3.0)?;
    assert_eq!(card.read(&memory)?, values.iter().map(|x| x * 3.0).collect::<Vec<_>>());
    Ok(())
}

fn blocks_form_clusters(card: &Card) -> Result<(), Failed> {
    if card.arch < Arch::SM90 {
        return Ok(());
    }
    let memory = DeviceMemory::new(&card.context, 8 * 4)?;
    let launch = Launch { cluster: [2, 1, 1], ..Launch::row(8, 32) };
    let function = card.module.function("ranks")?;
    // SAFETY: the kernel takes one `Ranks`, and writes one number for each of 8 blocks.
    unsafe { function.launch(launch, &Ranks { rank: memory.pointer() }, &card.stream)? };
    let bytes = memory.span(0..32).read(&card.stream)?;
    assert_eq!(bytes.chunks_exact(4).map(|b| b[0]).collect::<Vec<_>>(), [0, 1, 0, 1, 0, 1, 0, 1]);
    Ok(())
}

fn a_graph_replays_what_was_recorded(card: &Card) -> Result<(), Failed> {
    let memory = card.floats(&[1.0; 77])?;
    let graph = Graph::record(&card.stream, || -> Result<(), CudaError> {
        card.scale(&memory, 2.0)?;
        card.scale(&memory, 5.0)
    })?;
    assert_eq!(card.read(&memory)?, [1.0; 77], "recording runs nothing");
    assert_eq!(graph.nodes()?, 2);
    let mut exec = graph.instantiate()?;
    for _ in 0..3 {
        exec.launch(&card.stream)?;
    }
    assert_eq!(card.read(&memory)?, [1000.0; 77]);
    Ok(())
}

fn what_cannot_be_recorded_is_an_error_and_the_stream_goes_on(card: &Card) -> Result<(), Failed> {
    let memory = card.floats(&[1.0; 8])?;
    let refused = Graph::record(&card.stream, || card.stream.synchronize());
    assert!(refused.is_err());
    card.scale(&memory, 2.0)?;
    assert_eq!(card.read(&memory)?, [2.0; 8]);
    Ok(())
}

fn events_order_streams_and_take_the_time(card: &Card) -> Result<(), Failed> {
    let other = Stream::new(&card.context)?;
    let memory = card.floats(&vec![1.0; 1 << 22])?;
    let (start, end) = (Event::timed(&card.context)?, Event::timed(&card.context)?);
    start.record(&card.stream)?;
    for _ in 0..10 {
        card.scale(&memory, 2.0)?;
    }
    end.record(&card.stream)?;
    other.wait(&end)?;
    let first = memory.span(0..4).read(&other)?;
    assert_eq!(f32::from_le_bytes([first[0], first[1], first[2], first[3]]), 1024.0);
    end.synchronize()?;
    assert!(end.is_done()?);
    let seconds = start.seconds_until(&end)?;
    assert!(seconds > 1e-6 && seconds < 1.0, "{seconds} s");
    Ok(())
}

fn too_little_memory_is_told_in_bytes(card: &Card) -> Result<(), Failed> {
    let (_, total) = card.context.memory()?;
    let Err(error) = DeviceMemory::new(&card.context, total + (1 << 30)) else {
        return Err("it was given".into());
    };
    assert!(error.is_out_of_memory(), "{error}");
    Ok(())
}

fn kernels_are_kept_on_the_disk(card: &Card) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let (cache, compiler) = (KernelCache::at(folder.path()), Compiler::open()?);
    let get = || cache.compile(compiler, "test.cu", KERNELS, card.arch, &[]);
    let first = get()?;
    assert_eq!(std::fs::read_dir(folder.path())?.count(), 1);
    assert_eq!(get()?, first);
    Module::load(&card.context, &first)?.function("scale")?;
    assert!(Module::load(&card.context, &first)?.function("nothing").is_err());
    Ok(())
}

fn main() {
    let arguments = Arguments::from_args();
    let missing = Card::new().err();
    if let Some(reason) = &missing {
        eprintln!("skipped, no card to test on: {reason}");
    }
    let tests: [(&str, fn(&Card) -> Result<(), Failed>); 9] = [
        ("a_card_describes_itself", a_card_describes_itself),
        ("bytes_come_back_as_they_went", bytes_come_back_as_they_went),
        ("a_kernel_computes", a_kernel_computes),
        ("blocks_form_clusters", blocks_form_clusters),
        ("a_graph_replays_what_was_recorded", a_graph_replays_what_was_recorded),
        (
            "what_cannot_be_recorded_is_an_error_and_the_stream_goes_on",
            what_cannot_be_recorded_is_an_error_and_the_stream_goes_on,
        ),
        ("events_order_streams_and_take_the_time", events_order_streams_and_take_the_time),
        ("too_little_memory_is_told_in_bytes", too_little_memory_is_told_in_bytes),
        ("kernels_are_kept_on_the_disk", kernels_are_kept_on_the_disk),
    ];
    let trials = tests.map(|(name, test)| {
        Trial::test(name, move || test(&Card::new()?)).with_ignored_flag(missing.is_some())
    });
    libtest_mimic::run(&arguments, trials.into()).exit();
}
