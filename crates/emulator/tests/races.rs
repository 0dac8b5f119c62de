//! Tests of the detector of races: kernels with one race each, whose report names both accesses and what
//! would order them, and kernels that are right. Each runs with several seeds, because a race is found
//! whatever the order of execution.

mod common;

use common::{Outcome, module};
use libtest_mimic::{Arguments, Failed, Trial};
use xtrain_cuda::{Context, CudaDevice, DeviceMemory, Launch, Module, Stream};

/// Runs a kernel in two clusters of two blocks with 128 threads. `from` holds 1 KiB of zeros, `to` the
/// same. `%r1` is the thread, `%p1` holds in the first one of a block, `%p2` in the first warp; `%r8` is
/// the address of `bar`, an mbarrier of one arrival that the first thread has initialised, `%r7` that of
/// `area`; `%rd4` and `%rd5` are the thread's words of `from` and `to`.
fn run(body: &str) -> Outcome {
    let head = ".shared .align 1024 .b8 area[4096]; .shared .align 8 .b8 bar[16]; .reg .f32 %f<5>; .reg .b64 %d;
        mov.u32 %r8, bar; mov.u32 %r7, area; setp.eq.u32 %p1, %r1, 0; setp.lt.u32 %p2, %r1, 32; mov.u32 %r6, %ctaid.x;
        mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
        shr.u32 %r4, %r7, 4; cvt.u64.u32 %d, %r4; add.s64 %d, %d, 0x800400000; mad.lo.u32 %r3, %r1, 32, %r7; mov.u32 %r4, 0;\n.loc 1 5 1\n";
    let context = Context::new(CudaDevice::get(0)?)?;
    let stream = Stream::new(&context)?;
    let [from, to] = [DeviceMemory::new(&context, 1024)?, DeviceMemory::new(&context, 1024)?];
    from.all().write(&[0; 1024], &stream)?;
    to.all().write(&[0; 1024], &stream)?;
    // Each line of the body is a line of the source, from 11 on.
    let lines = body.lines().enumerate().map(|(n, line)| format!(".loc 1 {} 1\n{line}\n", n + 11));
    let module = Module::load(&context, &module("sm_90a", &format!("{head}{}", lines.collect::<String>())))?;
    let launch = Launch { cluster: [2, 1, 1], ..Launch::row(4, 128) };
    common::launch(&module, launch, from.pointer(), to.pointer(), &stream)?;
    stream.synchronize()?;
    Ok(())
}

/// Initialises the mbarrier, for copies too.
const INIT: &str = "@%p1 mbarrier.init.shared.b64 [%r8], 1; fence.mbarrier_init.release.cluster; bar.sync 0;";
/// Copies 256 bytes to `area`, which the mbarrier counts.
const COPY: &str = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256; @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%rd1], 256, [%r8];";
const WAIT: &str = "SPIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r8], 0; @!%p2 bra SPIN;";
/// Zeros in `area`, which `%d` describes for `wgmma`, and a product of it.
const ZERO: &str =
    "st.shared.v4.u32 [%r3], {%r4, %r4, %r4, %r4}; st.shared.v4.u32 [%r3+16], {%r4, %r4, %r4, %r4};";
const MULTIPLY: &str = "wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %d, %d, 0, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;";
const END: &str = "wgmma.wait_group.sync.aligned 0;";
/// Waits until the word %rd2 is 4, to which each block adds.
const POLL: &str = "LOOP: ld.acquire.gpu.global.u32 %r2, [%rd2]; setp.ne.u32 %p2, %r2, 4; @%p2 bra LOOP;";

/// Names, kernels and reports; an empty report where nothing races.
fn kernels() -> Vec<(&'static str, String, &'static str)> {
    let of_first = "@%p1 st.shared.u32 [%r7], %r1;";
    let read = "ld.shared.u32 %r2, [%r7];";
    // The first block of each cluster writes a word, and the second one reads it.
    let other = "mapa.shared::cluster.u32 %r5, %r7, 0; setp.ne.u32 %p2, %r6, 0;";
    let between = |write: &str, read: &str| {
        format!(
            "mul.wide.u32 %rd6, %r6, 4; add.s64 %rd6, %rd1, %rd6; mov.u32 %r5, 1;\n@!%p1 bra OUT; st.global.u32 [%rd6], %r5;\n{write}\n{read}\nld.global.u32 %r2, [%rd1+12]; OUT:"
        )
    };
    let by_lanes = "setp.lt.u32 %p2, %r1, 32; @!%p2 bra OUT; @%p1 st.shared.u32 [%r7], %r1;";
    // Each block counts once it has written 32 words, and the last one reads all of them.
    let last_block = |fence: &str, around: &str| {
        format!("mad.lo.u32 %r5, %r6, 32, %r1; mul.wide.u32 %rd6, %r5, 4; add.s64 %rd6, %rd1, %rd6; @%p2 st.global.u32 [%rd6], %r1; {fence}; bar.sync 0;
            @!%p1 bra OUT; {around}; atom.global.add.u32 %r2, [%rd2], 1; {around}; st.shared.u32 [%r7], %r2; OUT: bar.sync 0;
            ld.shared.u32 %r2, [%r7]; setp.ne.u32 %p2, %r2, 3; @%p2 bra END; {fence};\nld.global.u32 %r2, [%rd4]; END:")
    };
    vec![
        (
            "a_read_without_a_barrier",
            format!("{of_first}\n{read}"),
            "4 bytes at byte 0 of shared memory is not ordered after the ",
        ),
        ("a_read_after_a_barrier", format!("{of_first} bar.sync 0; {read}"), ""),
        ("a_write_before_a_barrier_is_over", format!("@%p1 st.shared.u32 [%r7], %r1; bar.sync 0;\n{read}\n{of_first}"), "4 bytes at byte 0 of shared memory is not ordered after the "),
        ("a_named_barrier_of_a_part", format!("setp.lt.u32 %p2, %r1, 64; @!%p2 bra OUT; {of_first} bar.sync 1, 64; {read} OUT:"), ""),
        ("lanes_without_a_barrier", format!("{by_lanes} vote.sync.any.pred %p2, %p1, -1; {read} OUT:"), "`__syncwarp()` (bar.warp.sync) would order them"),
        ("lanes_that_meet", format!("{by_lanes} bar.warp.sync -1; {read} OUT:"), ""),
        ("lanes_that_write_one_word", "st.shared.u32 [%r7], %r4;".into(), "write of 4 bytes at byte 0"),
        ("lanes_that_write_one_word_by_strong_stores", "st.relaxed.cta.shared.u32 [%r7], %r4; st.volatile.shared.u32 [%r7], %r4;".into(), ""),
        ("bytes_of_one_word", "cvt.u64.u32 %rd6, %r7; add.s64 %rd6, %rd6, %rd3; cvt.u32.u64 %r5, %rd6; sub.s32 %r5, %r5, %r1; sub.s32 %r5, %r5, %r1; sub.s32 %r5, %r5, %r1; st.shared.u8 [%r5], %r1;".into(), ""),
        ("a_counter_that_is_reset_by_a_weak_store", "atom.global.add.u32 %r2, [%rd1], 1; setp.eq.u32 %p1, %r2, 511; @%p1 st.global.u32 [%rd1], 0;".into(), "strong update (.gpu) by block ["),
        ("blocks_without_a_fence", between("red.global.add.u32 [%rd2], 1;", POLL), "of 4 bytes at offset 12 of an allocation of 1024 bytes is not ordered after the write by block [3, 0, 0], warp 0, lane 0 at step.cu:12; "),
        ("blocks_with_a_fence", between("membar.gl; red.global.add.u32 [%rd2], 1;", POLL), ""),
        ("blocks_with_a_release", between("red.release.gpu.global.add.u32 [%rd2], 1;", POLL), ""),
        ("a_release_of_too_narrow_a_scope", between("red.release.cta.global.add.u32 [%rd2], 1;", POLL), "race: "),
        ("a_fence_of_too_narrow_a_scope", between("membar.cta; red.global.add.u32 [%rd2], 1;", POLL), "race: read of 4 bytes"),
        ("an_acquire_by_a_fence", between("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%rd2], 1;", &format!("{} membar.gl;", POLL.replace("acquire.gpu", "volatile"))), ""),
        ("a_read_that_acquires_nothing", between("membar.gl; red.global.add.u32 [%rd2], 1;", &POLL.replace("acquire.gpu", "volatile")), "race: read of "),
        // All of these fences are `sc`, so each one before the count comes before each one after it.
        ("fences_before_a_barrier", last_block("membar.gl", "membar.cta"), ""),
        ("fences_before_a_barrier_that_are_not_sc", last_block("fence.acq_rel.gpu", "membar.cta"), "race: read of 4 bytes"),
        ("fences_after_a_barrier_that_are_not_sc", last_block("membar.cta", "fence.acq_rel.gpu"), ""),
        ("a_constant_that_is_written", "st.global.u32 [%rd4], %r1;\nld.global.nc.u32 %r2, [%rd4];".replace("st.global", "setp.eq.u32 %p2, %r6, 0; @%p2 st.global"), "what no thread may write while the kernel runs"),
        ("a_cluster_without_a_barrier", format!("{other} @!%p2 {}\n@%p2 ld.shared::cluster.u32 %r2, [%r5]; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", "st.shared.u32 [%r7], %r4;".replace("st.", "st.relaxed.gpu.")), "`barrier.cluster`, or a release and an acquire of scope .cluster, would order them"),
        ("a_cluster_that_meets", format!("{other} {of_first}\nbarrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ld.shared::cluster.u32 %r2, [%r5]; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"), ""),
        ("a_cluster_that_meets_without_release", format!("{other} {of_first}\nbarrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; ld.shared::cluster.u32 %r2, [%r5]; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"), "race: read of 4 bytes"),
        ("a_copy_that_is_waited_for", format!("{INIT} {COPY} {WAIT} {read}"), ""),
        ("a_copy_that_one_thread_waits_for", format!("{INIT} {COPY} @!%p1 bra OUT; {WAIT} OUT: bar.sync 0; {read}"), ""),
        ("a_wait_for_another_mbarrier", format!("{INIT} @%p1 mbarrier.init.shared.b64 [%r8+8], 1; bar.sync 0; {COPY} @%p1 mbarrier.arrive.shared.b64 _, [%r8+8];\n{}\n@!%p1 bra OUT; AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r8], 0; @!%p2 bra AGAIN; OUT: @!%p1 {read} barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", WAIT.replace("[%r8]", "[%r8+8]")), "shared memory"),
        ("an_mbarrier_that_is_not_fenced", format!("@%p1 mbarrier.init.shared.b64 [%r8], 1; bar.sync 0; {COPY} {WAIT}"), "`fence.mbarrier_init` or `fence.proxy.async` after the write"),
        ("an_mbarrier_that_is_invalidated", format!("@%p1 mbarrier.init.shared.b64 [%r8], 1; fence.proxy.async; bar.sync 0; {COPY} {WAIT} bar.sync 0; @%p1 mbarrier.inval.shared.b64 [%r8];\n@%p1 st.shared.u32 [%r8], %r4;"), ""),
        ("a_product_of_what_threads_wrote", format!("{ZERO} bar.sync 0; {MULTIPLY} {END}"), "`fence.proxy.async` after the write is missing"),
        ("a_product_after_a_proxy_fence", format!("{ZERO} fence.proxy.async; bar.sync 0; {MULTIPLY} {END}"), ""),
        ("a_product_after_a_proxy_fence_of_its_warp", format!("{ZERO} bar.sync 0; fence.proxy.async; {MULTIPLY} {END}"), ""),
        ("a_product_after_a_proxy_fence_without_a_barrier", format!("{ZERO} bar.sync 0; {of_first}\nfence.proxy.async; {MULTIPLY} {END}"), "bytes at byte 0 of shared memory is not ordered after the "),
        ("an_operand_that_another_warp_overwrites", format!("{ZERO} fence.proxy.async; bar.sync 0; {MULTIPLY} bar.sync 0;\n{END} {of_first}"), "shared memory"),
        ("an_operand_that_is_overwritten_after_a_barrier", format!("{ZERO} fence.proxy.async; bar.sync 0; {MULTIPLY} {END} bar.sync 0; {of_first}"), ""),
        ("a_source_without_a_proxy_fence", "@!%p1 bra OUT; st.shared.v4.u32 [%r7], {%r4, %r4, %r4, %r4}; setp.eq.u32 %p2, %r6, 0;\n@%p2 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r7], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; OUT:".into(), "race: read by a bulk copy of 16 bytes"),
        ("a_source_that_is_waited_for", "@!%p1 bra OUT; st.shared.v4.u32 [%r7], {%r4, %r4, %r4, %r4}; fence.proxy.async.shared::cta; setp.eq.u32 %p2, %r6, 0;\n@%p2 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r7], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; st.shared.u32 [%r7], %r1; cp.async.bulk.wait_group 0; @%p2 ld.global.u32 %r2, [%rd1]; OUT:".into(), ""),
        ("a_target_that_is_not_waited_for", "@!%p1 bra OUT; st.shared.v4.u32 [%r7], {%r4, %r4, %r4, %r4}; fence.proxy.async.shared::cta; setp.eq.u32 %p2, %r6, 0;\n@%p2 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r7], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;\n@%p2 ld.global.u32 %r2, [%rd1]; cp.async.bulk.wait_group 0; OUT:".into(), "`cp.async.bulk.wait_group` after the copy"),
        ("a_copy_that_others_do_not_wait_for", format!("@%p1 cp.async.ca.shared.global [%r7], [%rd1], 4; cp.async.wait_all;\n@!%p1 {read}"), "race: "),
        ("a_copy_that_all_wait_for", format!("@%p1 cp.async.ca.shared.global [%r7], [%rd1], 4; cp.async.wait_all; bar.sync 0;\n{read}"), ""),
    ]
}

/// Runs the kernel of the case; a report is an error.
fn run_case() -> Outcome {
    let name = std::env::var(common::CHILD)?;
    let (_, body, _) = kernels().into_iter().find(|(of, ..)| *of == name).ok_or("no kernel has this name")?;
    run(&body)
}

fn check(name: &str, says: &str) -> Result<(), Failed> {
    for seed in 0..4 {
        let output = common::child(name, &format!("races=1 seed={seed}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() != says.is_empty() || !said.contains(says) {
            return Err(format!("seed {seed}: {}, expected `{says}`:\n{said}", output.status).into());
        }
    }
    Ok(())
}

fn main() -> Outcome {
    let kernels = kernels();
    common::run_as_child(
        &kernels.iter().map(|(name, ..)| (*name, run_case as common::Body)).collect::<Vec<_>>(),
    )?;
    let tests = kernels.into_iter().map(|(name, _, says)| Trial::test(name, move || check(name, says)));
    libtest_mimic::run(&Arguments::from_args(), tests.collect()).exit()
}
