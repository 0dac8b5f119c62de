//! Tests of the sanitizer: each kernel has one fault, and the report is one line with kernel, source line,
//! block and thread.

mod common;

use common::{Case, Outcome, module};
use xtrain_cuda::{Context, CudaDevice, DeviceMemory, Launch, Module, Stream};

/// Launches a kernel with two blocks of 64 threads. `from` is initialised and `to` is not; each holds one u32
/// a thread.
fn run(body: &str) -> Outcome {
    run_as(Launch::row(2, 64), body)
}

fn run_as(launch: Launch, body: &str) -> Outcome {
    results_of(launch, body, false)
}

/// Launches a kernel, and copies `to` to the host if it `reads` it.
fn results_of(launch: Launch, body: &str, reads: bool) -> Outcome {
    let context = Context::new(CudaDevice::get(0)?)?;
    let stream = Stream::new(&context)?;
    let [from, to] = [DeviceMemory::new(&context, 256)?, DeviceMemory::new(&context, 256)?];
    from.all().write(&[1; 256], &stream)?;
    let module = Module::load(&context, &module("sm_90a", body))?;
    common::launch(&module, launch, from.pointer(), to.pointer(), &stream)?;
    stream.synchronize()?;
    if reads {
        to.all().read(&stream)?;
    }
    Ok(())
}

/// Checks that a kernel fails; its case checks the report.
fn fails(body: &str) -> Outcome {
    if run(body).is_ok() { Err("no fault was reported".into()) } else { Ok(()) }
}

/// Launches a kernel with a cluster of two blocks of 128 threads each, and checks that it fails. `area` is 4
/// KiB of zeros in shared memory, `%d` a descriptor of matrices in it, `%r8` the address of `bar`, an
/// mbarrier of two arrivals.
fn fails_in_a_cluster(body: &str) -> Outcome {
    let head = ".shared .align 1024 .b8 area[4096]; .shared .align 8 .b8 bar[8]; .reg .f32 %f<5>; .reg .b64 %d;
        mov.u32 %r2, area; mad.lo.u32 %r2, %r1, 32, %r2; mov.u32 %r3, 0;
        st.shared.v4.u32 [%r2], {%r3, %r3, %r3, %r3}; st.shared.v4.u32 [%r2+16], {%r3, %r3, %r3, %r3};
        mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1; setp.lt.u32 %p1, %r1, 1000;
        mov.u32 %r4, area; shr.u32 %r4, %r4, 4; cvt.u64.u32 %d, %r4; add.s64 %d, %d, 0x800400000;
        mov.u32 %r8, bar; setp.eq.u32 %p2, %r1, 0; @%p2 mbarrier.init.shared.b64 [%r8], 2;
        fence.proxy.async; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n";
    let launch = Launch { cluster: [2, 1, 1], ..Launch::row(2, 128) };
    if run_as(launch, &format!("{head}{body}")).is_ok() {
        Err("no fault was reported".into())
    } else {
        Ok(())
    }
}

/// A `wgmma` with its fence and its group.
const MULTIPLY: &str = "wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %d, %d, %p1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;";
const WAIT: &str = "wgmma.wait_group.sync.aligned 0;";

/// Names, reports and kernels of faults in a cluster.
const IN_A_CLUSTER: [(&str, &str, fn() -> Outcome); 29] = [
    ("a_sum_that_is_read_before_its_wait", "the warp has not waited for its `wgmma` of step.cu:7", || {
        fails_in_a_cluster(&format!("{MULTIPLY} add.f32 %f1, %f1, %f1; {WAIT} st.global.f32 [%rd4], %f1;"))
    }),
    ("a_sum_that_is_stored_before_its_wait", "the warp has not waited for its `wgmma` of step.cu:7", || {
        fails_in_a_cluster(&format!("{MULTIPLY} st.global.f32 [%rd4], %f1; {WAIT}"))
    }),
    ("a_sum_that_is_overwritten", "an accumulator is overwritten before the wait for its `wgmma`", || {
        fails_in_a_cluster(&format!("{MULTIPLY} mov.f32 %f2, 0f00000000; {WAIT}"))
    }),
    (
        "a_register_of_an_operand_that_is_overwritten",
        "a register of A is overwritten before the wait",
        || {
            let multiply =
                MULTIPLY.replace("%d, %d, %p1, 1, 1, 0, 0", "{%r3, %r3, %r3, %r3}, %d, %p1, 1, 1, 0");
            fails_in_a_cluster(&format!("{multiply} add.s32 %r3, %r3, 1; {WAIT}"))
        },
    ),
    ("an_operand_that_is_overwritten", "which the asynchronous work of step.cu:7 still reads", || {
        fails_in_a_cluster(&format!("{MULTIPLY} st.shared.u32 [area], %r1; {WAIT}"))
    }),
    ("a_product_without_a_fence", "`wgmma` without a `wgmma.fence` before it", || {
        fails_in_a_cluster(&MULTIPLY.replace("wgmma.fence.sync.aligned;", ""))
    }),
    ("a_product_after_a_write_of_a_sum", "and after other uses of its registers", || {
        let again = MULTIPLY.replace("wgmma.fence.sync.aligned;", "");
        fails_in_a_cluster(&format!("{MULTIPLY} {WAIT} add.f32 %f1, %f1, %f1; {again} {WAIT}"))
    }),
    ("a_product_after_a_read_of_a_sum", "and after other uses of its registers", || {
        let again = MULTIPLY.replace("wgmma.fence.sync.aligned;", "");
        fails_in_a_cluster(&format!("{MULTIPLY} {WAIT} @%p2 st.global.f32 [%rd1], %f1; {again} {WAIT}"))
    }),
    ("a_sum_that_is_overwritten_between_products", "an accumulator is overwritten before the wait", || {
        fails_in_a_cluster(&format!("{MULTIPLY} mov.f32 %f2, 0f00000000; {MULTIPLY} {WAIT}"))
    }),
    ("a_product_that_is_not_waited_for", "exits without `wgmma.wait_group` for this `wgmma`", || {
        fails_in_a_cluster(MULTIPLY)
    }),
    ("a_matrix_within_the_pattern_of_its_swizzle", "does not begin with a pattern of its swizzle", || {
        fails_in_a_cluster(&format!("add.s64 %d, %d, 0x4000000000000008; {MULTIPLY} {WAIT}"))
    }),
    ("a_product_of_three_warps", "the warps of a warpgroup execute different `wgmma`", || {
        fails_in_a_cluster(&format!("setp.lt.u32 %p2, %r1, 32; @%p2 bra OUT; {MULTIPLY} {WAIT} OUT:"))
    }),
    ("a_descriptor_beyond_shared_memory", "reaches beyond the", || {
        fails_in_a_cluster(&format!("add.s64 %d, %d, 256; {MULTIPLY}"))
    }),
    (
        "a_phase_that_nobody_ends",
        "wait for phase 0 of the mbarrier at 4096 of block 0, whose phase 0 lacks 1 of 2",
        || {
            fails_in_a_cluster(
                "@%p2 mbarrier.arrive.shared.b64 _, [%r8];
             SPIN: mbarrier.try_wait.parity.shared.b64 %p1, [%r8], 0; @!%p1 bra SPIN;",
            )
        },
    ),
    ("an_arrival_too_many", "lacks 0 of 2 arrivals", || {
        fails_in_a_cluster("@%p2 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r8], 16; @%p2 mbarrier.arrive.shared.b64 _, [%r8], 2;
            @%p2 mbarrier.arrive.shared.b64 _, [%r8];")
    }),
    ("an_mbarrier_that_is_initialised_twice", "of shared memory a second time", || {
        fails_in_a_cluster("@%p2 mbarrier.init.shared.b64 [%r8], 2;")
    }),
    ("a_wait_for_another_block", "waits for an mbarrier of another block", || {
        fails_in_a_cluster(
            "mov.u64 %rd6, bar; cvta.shared.u64 %rd6, %rd6; mapa.u64 %rd6, %rd6, 1;
             mbarrier.try_wait.parity.b64 %p1, [%rd6], 0;",
        )
    }),
    ("an_mbarrier_that_is_overwritten", "which was overwritten", || {
        fails_in_a_cluster("st.shared.u32 [%r8], %r1; mbarrier.arrive.shared.b64 _, [%r8];")
    }),
    ("registers_that_nobody_gives_back", "`setmaxnreg.inc` waits: 0 registers are free", || {
        fails_in_a_cluster("setmaxnreg.inc.sync.aligned.u32 240;")
    }),
    ("registers_of_a_part_of_a_warpgroup", "do not execute the same `setmaxnreg`", || {
        fails_in_a_cluster("setp.lt.u32 %p2, %r1, 32; @%p2 bra OUT; setmaxnreg.dec.sync.aligned.u32 40; OUT:")
    }),
    (
        "a_second_arrival_at_a_cluster",
        "arrives at the cluster's barrier a second time without waiting",
        || fails_in_a_cluster("barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;"),
    ),
    ("a_block_that_a_cluster_lacks", "maps to block 2 of a cluster of 2", || {
        fails_in_a_cluster(
            "mapa.shared::cluster.u32 %r4, %r8, 2; mbarrier.arrive.shared::cluster.b64 _, [%r4];",
        )
    }),
    ("a_copy_of_an_odd_size", "a bulk copy of 20 bytes, which is no multiple of 16", || {
        fails_in_a_cluster(
            "mov.u32 %r4, area; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1], 20, [%r8];",
        )
    }),
    ("a_copy_that_is_read_before_it_has_ended", "which the copy of step.cu:7 has not written yet", || {
        fails_in_a_cluster(
            "mov.u32 %r4, area;
             @%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1], 256, [%r8];
             @%p2 ld.shared.u32 %r4, [%r4]; @%p2 st.global.u32 [%rd1], %r4;",
        )
    }),
    ("a_tensor_map_that_is_none", "as a map of a tensor with 2 dimensions, which it is not", || {
        fails_in_a_cluster(
            "mov.u32 %r4, area; cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
             [%r4], [%rd1, {%r3, %r3}], [%r8];",
        )
    }),
    (
        "a_tensor_map_in_shared_memory",
        "uses a tensor map in Cluster memory; it must be in global memory",
        || {
            fails_in_a_cluster(
                "mov.u64 %rd6, area; cvta.shared.u64 %rd6, %rd6; cp.async.bulk.prefetch.tensor.2d.L2.global
             [%rd6, {%r3, %r3}];",
            )
        },
    ),
    (
        "a_source_that_is_not_waited_for",
        "exits without `cp.async.bulk.wait_group.read` for this copy",
        || {
            fails_in_a_cluster(
                "mov.u32 %r4, area; @%p2 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r4], 256;
             cp.async.bulk.commit_group;",
            )
        },
    ),
    ("an_addition_to_what_was_never_written", "adds to memory that nothing has written", || {
        fails_in_a_cluster(
            "mov.u32 %r4, area; cvta.to.global.u64 %rd6, %rd2; @%p2 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32
             [%rd6], [%r4], 256; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
        )
    }),
    ("a_source_that_is_overwritten", "which the asynchronous work of step.cu:7 still reads", || {
        fails_in_a_cluster(
            "mov.u32 %r4, area; @%p2 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r4], 256;
             @%p2 cp.async.bulk.commit_group; @%p2 st.shared.u32 [%r4], %r1; @%p2 cp.async.bulk.wait_group.read 0;",
        )
    }),
];

fn memory_that_was_freed() -> Outcome {
    let context = Context::new(CudaDevice::get(0)?)?;
    let stream = Stream::new(&context)?;
    let [kept, freed] = [DeviceMemory::new(&context, 256)?, DeviceMemory::new(&context, 256)?];
    let pointer = freed.pointer();
    drop(freed);
    common::step(&context, pointer, kept.pointer(), &stream)?;
    if stream.synchronize().is_ok() { Err("no fault was reported".into()) } else { Ok(()) }
}

fn what_is_right_passes() -> Outcome {
    // Copies and overwrites uninitialised values; half a warp diverges before a barrier.
    run("ld.global.u32 %r2, [%rd5];
         st.global.u32 [%rd5], %r2;
         and.b32 %r4, %r1, 16;
         setp.eq.u32 %p1, %r4, 0;
         @%p1 bra ALL;
         st.global.u32 [%rd4], 7;
         ALL: bar.sync 0;
         st.global.u32 [%rd5], 7;")?;
    // Lane 0 waits for a value that lane 1 stores further down.
    run("setp.ne.u32 %p1, %r1, 0;
         @%p1 bra STORES;
         SPIN: ld.volatile.global.u32 %r2, [%rd1];
         setp.ne.u32 %p2, %r2, 9;
         @%p2 bra SPIN;
         bra.uni DONE;
         STORES: setp.ne.u32 %p2, %r1, 1;
         @%p2 bra DONE;
         st.volatile.global.u32 [%rd1], 9;
         DONE:")?;
    // Every lane takes a lock, adds to a sum and frees the lock.
    run("TAKE: atom.global.cas.b32 %r2, [%rd1], 0x01010101, 7;
         setp.ne.u32 %p1, %r2, 0x01010101;
         @%p1 bra TAKE;
         ld.volatile.global.u32 %r3, [%rd1+4];
         add.s32 %r3, %r3, 1;
         st.volatile.global.u32 [%rd1+4], %r3;
         atom.global.exch.b32 %r2, [%rd1], 0x01010101;")
}

fn main() -> Outcome {
    let case = |name, says, body| Case { name, settings: "", says, body };
    let in_a_cluster = IN_A_CLUSTER.map(|(name, says, body)| case(name, says, body));
    let cases = [
        case("what_is_right_passes", "", what_is_right_passes),
        case(
            "an_address_outside_of_memory",
            "writes global memory out of bounds: 4 bytes at offset 256 of an allocation of 256 bytes: kernel step, step.cu:7, block [",
            || fails("add.s64 %rd5, %rd5, 4; st.global.u32 [%rd5], 0;"),
        ),
        case("an_address_outside_of_shared_memory", "shared memory", || fails("st.shared.u32 [%rd3], 0;")),
        case(
            "a_misaligned_vector",
            "which is not aligned to 16 bytes: kernel step, step.cu:7, block [",
            || fails("add.s64 %rd5, %rd2, 8; st.global.v4.u32 [%rd5], {%r1, %r1, %r1, %r1};"),
        ),
        case(
            "arithmetic_with_what_was_never_written",
            "uses an uninitialised value: kernel step, step.cu:7",
            || fails("ld.global.u32 %r2, [%rd5]; add.s32 %r3, %r2, 1; st.global.u32 [%rd4], %r3;"),
        ),
        case("a_branch_on_what_was_never_written", "uninitialised", || {
            fails(
                "ld.global.u32 %r2, [%rd5]; setp.eq.u32 %p1, %r2, 0; @%p1 bra OUT; st.global.u32 [%rd4], 1; OUT:",
            )
        }),
        case("an_atomic_on_what_was_never_written", "uninitialised", || {
            fails("red.global.add.u32 [%rd5], 1;")
        }),
        case("an_address_that_was_never_written", "uninitialised", || {
            fails("ld.global.u64 %rd6, [%rd2]; st.global.u32 [%rd6], 1;")
        }),
        case(
            "a_barrier_that_half_a_warp_leaves_out",
            "waits at a barrier that some threads never reach (",
            || fails("setp.gt.u32 %p1, %r1, 47; @%p1 bra OUT; bar.sync 0; OUT:"),
        ),
        case("a_barrier_with_two_counts", "barrier 1 is used with ", || {
            fails("setp.gt.u32 %p1, %r1, 31; @%p1 bar.arrive 1, 32; @!%p1 bar.sync 1, 64;")
        }),
        case(
            "a_barrier_at_two_places",
            "waits at a barrier while other threads of its block wait at a different one",
            || fails("setp.gt.u32 %p1, %r1, 31; @%p1 bra OTHER; bar.sync 0; ret; OTHER: bar.sync 0;"),
        ),
        case(
            "a_wait_for_what_nobody_writes",
            "deadlock: polls memory that no other thread will change: kernel step, step.cu:7",
            || fails("SPIN: ld.volatile.global.u32 %r2, [%rd4]; setp.ne.u32 %p1, %r2, 9; @%p1 bra SPIN;"),
        ),
        case("a_lock_that_nobody_frees", "deadlock: polls memory that no other thread will change", || {
            fails("SPIN: atom.global.cas.b32 %r2, [%rd1], -1, 7; setp.ne.u32 %p1, %r2, -1; @%p1 bra SPIN;")
        }),
        case(
            "a_loop_that_counts_for_ever",
            "endless loop: 200 million instructions of this launch changed no memory",
            || fails("LOOP: add.s32 %r2, %r2, 1; setp.ne.u32 %p1, %r1, 99; @%p1 bra LOOP;"),
        ),
        case("a_loop_that_stores_one_value_for_ever", "deadlock: ", || {
            fails("LOOP: st.global.u32 [%rd4], 7; setp.ne.u32 %p1, %r1, 99; @%p1 bra LOOP;")
        }),
        case("shared_memory_that_was_never_written", "uses an uninitialised value", || {
            fails(
                ".shared .align 4 .b8 buffer[256];
                   mov.u64 %rd6, buffer; add.s64 %rd6, %rd6, %rd3;
                   ld.shared.u32 %r2, [%rd6]; add.s32 %r2, %r2, 1; st.global.u32 [%rd4], %r2;",
            )
        }),
        case(
            "a_barrier_of_a_part_of_a_warp",
            "a barrier of 10 threads, which is not a multiple of 32",
            || fails("bar.sync 1, 10;"),
        ),
        case("memory_that_was_freed", "reads global memory out of bounds", memory_that_was_freed),
        case(
            "a_copy_to_the_host_of_what_was_never_written",
            "a copy to the host reads bytes that were never written: 256 of 256 bytes at offset 0 of an allocation of 256 bytes; the first, byte 0 of them, no kernel or copy wrote",
            || {
                let context = Context::new(CudaDevice::get(0)?)?;
                let memory = DeviceMemory::new(&context, 256)?;
                let copied = memory.all().read(&Stream::new(&context)?);
                if copied.is_ok() { Err("no fault was reported".into()) } else { Ok(()) }
            },
        ),
        case(
            "a_copy_to_the_host_of_what_a_kernel_stored_without_a_value",
            "4 of 256 bytes at offset 0 of an allocation of 256 bytes; the first, byte 20 of them, was stored without ever having \
             had a value by kernel step, step.cu:7, block [0, 0, 0], thread [5, 0, 0]",
            || {
                let body = ".shared .align 4 .b8 buffer[256]; mov.u64 %rd6, buffer; add.s64 %rd6, %rd6, %rd3;
                    setp.ne.u32 %p1, %r1, 5; @%p1 st.shared.u32 [%rd6], %r1; ld.shared.u32 %r2, [%rd6];
                    st.global.u32 [%rd5], %r2;";
                if results_of(Launch::row(1, 64), body, true).is_ok() {
                    return Err("no fault was reported".into());
                }
                Ok(())
            },
        ),
        case("a_shuffle_whose_mask_lacks_the_lane", "does not contain the lane itself", || {
            fails("shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, 1; st.global.u32 [%rd4], %r2;")
        }),
    ];
    common::main(&[&cases[..], &in_a_cluster].concat())
}
