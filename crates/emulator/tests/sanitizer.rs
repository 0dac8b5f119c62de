//! Tests of the sanitizer: each kernel has one fault, and the report is one line with kernel, source line,
//! block and thread.

mod common;

use common::{Case, Outcome, module};
use xtrain_cuda::{Context, Device, DeviceMemory, Launch, Module, Stream};

/// Launches a kernel with two blocks of 64 threads. `from` is initialised and `to` is not; each holds one u32
/// a thread.
fn run(body: &str) -> Outcome {
    let context = Context::new(Device::at(0)?)?;
    let stream = Stream::new(&context)?;
    let [from, to] = [DeviceMemory::new(&context, 256)?, DeviceMemory::new(&context, 256)?];
    from.all().write(&[1; 256], &stream)?;
    let module = Module::load(&context, &module("sm_90a", body))?;
    common::launch(&module, Launch::row(2, 64), from.pointer(), to.pointer(), &stream)?;
    stream.synchronize()?;
    Ok(())
}

/// Checks that a kernel fails; its case checks the report.
fn fails(body: &str) -> Outcome {
    if run(body).is_ok() { Err("no fault was reported".into()) } else { Ok(()) }
}

fn memory_that_was_freed() -> Outcome {
    let context = Context::new(Device::at(0)?)?;
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
    common::main(&[
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
            "a copy to the host reads bytes that no kernel or copy wrote",
            || {
                let context = Context::new(Device::at(0)?)?;
                let memory = DeviceMemory::new(&context, 256)?;
                let copied = memory.all().read(&Stream::new(&context)?);
                if copied.is_ok() { Err("no fault was reported".into()) } else { Ok(()) }
            },
        ),
        case("a_shuffle_whose_mask_lacks_the_lane", "does not contain the lane itself", || {
            fails("shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, 1; st.global.u32 [%rd4], %r2;")
        }),
    ])
}
