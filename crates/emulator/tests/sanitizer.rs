//! Tests of the sanitizer: each kernel has one fault, and the report is one line with kernel, source line, block and thread.

mod common;

use common::{Case, Outcome, module};
use xtrain_cuda::{Context, Device, DeviceMemory, Launch, Module, Stream};

/// Launches a kernel with two blocks of 64 threads. `from` is initialised and `to` is not; each holds one u32 a thread.
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

fn what_is_right_passes() -> Outcome {
    // Copies and overwrites uninitialised values; half a warp diverges before a barrier.
    run("ld.global.u32 %r2, [%rd5];
         st.global.u32 [%rd5], %r2;
         and.b32 %r4, %r1, 16;
         setp.eq.u32 %p1, %r4, 0;
         @%p1 bra ALL;
         st.global.u32 [%rd4], 7;
         ALL: bar.sync 0;
         st.global.u32 [%rd5], 7;")
}

fn main() -> Outcome {
    let case = |name, says, body| Case { name, settings: "", says, body };
    common::main(&[
        case("what_is_right_passes", "", what_is_right_passes),
        case(
            "an_address_outside_of_memory",
            "4 bytes at byte 256 of an allocation of 256: kernel step, ?:0, block [",
            || fails("add.s64 %rd5, %rd5, 4; st.global.u32 [%rd5], 0;"),
        ),
        case("an_address_outside_of_shared_memory", "shared memory", || fails("st.shared.u32 [%rd3], 0;")),
        case("a_misaligned_vector", "which is no multiple of 16: kernel step, ?:0, block [", || {
            fails("add.s64 %rd5, %rd2, 8; st.global.v4.u32 [%rd5], {%r1, %r1, %r1, %r1};")
        }),
        case("arithmetic_with_what_was_never_written", "uses a value that was never written", || {
            fails("ld.global.u32 %r2, [%rd5]; add.s32 %r3, %r2, 1; st.global.u32 [%rd4], %r3;")
        }),
        case("a_branch_on_what_was_never_written", "never written", || {
            fails(
                "ld.global.u32 %r2, [%rd5]; setp.eq.u32 %p1, %r2, 0; @%p1 bra OUT; st.global.u32 [%rd4], 1; OUT:",
            )
        }),
        case("an_atomic_on_what_was_never_written", "never written", || {
            fails("red.global.add.u32 [%rd5], 1;")
        }),
        case("an_address_that_was_never_written", "never written", || {
            fails("ld.global.u64 %rd6, [%rd2]; st.global.u32 [%rd6], 1;")
        }),
        case("a_barrier_that_half_a_warp_leaves_out", "waits at a barrier that not all reach (", || {
            fails("setp.gt.u32 %p1, %r1, 47; @%p1 bra OUT; bar.sync 0; OUT:")
        }),
        case(
            "a_barrier_at_two_places",
            "waits at a barrier while other threads of the block wait at another",
            || fails("setp.gt.u32 %p1, %r1, 31; @%p1 bra OTHER; bar.sync 0; ret; OTHER: bar.sync 0;"),
        ),
        case("a_wait_for_what_nobody_writes", "waits for what no other thread does, for ever", || {
            fails("SPIN: ld.volatile.global.u32 %r2, [%rd4]; setp.ne.u32 %p1, %r2, 9; @%p1 bra SPIN;")
        }),
        case("a_shuffle_whose_mask_lacks_the_lane", "does not name the lane itself", || {
            fails("shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, 1; st.global.u32 [%rd4], %r2;")
        }),
    ])
}
