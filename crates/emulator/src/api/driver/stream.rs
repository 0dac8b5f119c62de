//! Streams, events, captures and graphs.

use super::{Handle, In, Out, call, export, on_device, synchronizing, waiting};
use crate::machine::MachineEvent;
use crate::status;
use crate::work::WorkItem;
use std::ffi::{c_int, c_uint, c_ulonglong};

export! {
    fn cuStreamCreateWithPriority(stream: Out<Handle>, _flags: c_uint, _priority: c_int) {
        on_device(|machine, device| {
            let handle = machine.new_stream(device);
            stream.set(handle)
        })
    }

    fn cuStreamDestroy_v2(stream: Handle) {
        call(|machine| {
            // Queued work of the stream still runs.
            machine.streams.remove(&stream).map(|_| ()).ok_or(status::INVALID_HANDLE)
        })
    }

    fn cuStreamSynchronize(stream: Handle) {
        waiting(|machine| {
            if let Some((capture, _)) = machine.streams.get(&stream).and_then(|stream| stream.captured.clone()) {
                return Err(machine.invalidate_capture(capture, status::CAPTURE_UNSUPPORTED));
            }
            machine.tail_of(stream)
        })
    }

    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) {
        on_device(|machine, _| machine.wait(stream, event))
    }

    fn cuStreamBatchMemOp_v2(stream: Handle, count: c_uint, operations: In<[u64; 6]>, flags: c_uint) {
        on_device(|machine, _| {
            if flags != 0 || count > 256 {
                return Err(status::INVALID_VALUE);
            }
            for n in 0..count as usize {
                // `CUstreamBatchMemOpParams`: kind, address, value, flags.
                let [kind, address, value, flags, ..] = operations.offset(n).get()?;
                let (kind, value) = (kind as u32, value as u32);
                machine.put(stream, match (kind, flags as u32) {
                    // CU_STREAM_MEM_OP_WAIT_VALUE_32 with CU_STREAM_WAIT_VALUE_GEQ
                    (1, 0) => WorkItem::Await { source: address, least: value },
                    // CU_STREAM_MEM_OP_WRITE_VALUE_32, after a fence
                    (2, 0) => WorkItem::Signal { target: address, value },
                    _ => return Err(status::NOT_SUPPORTED),
                })?;
            }
            Ok(())
        })
    }

    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) {
        on_device(|machine, _| {
            // Only thread-local captures are emulated.
            if mode != 1 {
                return Err(status::NOT_SUPPORTED);
            }
            machine.begin_capture(stream, std::thread::current().id())
        })
    }

    fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) {
        on_device(|machine, _| {
            let ended = machine.end_capture(stream, std::thread::current().id());
            graph.set(ended.unwrap_or(0))?;
            ended.map(|_| ())
        })
    }

    fn cuEventCreate(event: Out<Handle>, _flags: c_uint) {
        on_device(|machine, _| {
            let handle = machine.handle();
            machine.events.insert(handle, MachineEvent::default());
            event.set(handle)
        })
    }

    fn cuEventRecord(event: Handle, stream: Handle) {
        on_device(|machine, _| machine.record(event, stream, false))
    }

    fn cuEventRecordWithFlags(event: Handle, stream: Handle, flags: c_uint) {
        on_device(|machine, _| machine.record(event, stream, flags & 1 != 0))
    }

    fn cuEventQuery(event: Handle) {
        on_device(|machine, device| {
            let has_completed = machine.has_completed(event)?;
            machine.check(device)?;
            if has_completed { Ok(()) } else { Err(status::NOT_READY) }
        })
    }

    fn cuEventSynchronize(event: Handle) {
        waiting(|machine| {
            if let Some((capture, _)) = machine.events.get(&event).and_then(|event| event.captured.clone()) {
                return Err(machine.invalidate_capture(capture, status::CAPTURED_EVENT));
            }
            machine.completable(event)
        })
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: Handle, end: Handle) {
        on_device(|machine, _| {
            let time = |event| machine.events.get(&event).ok_or(status::INVALID_HANDLE)?.time.ok_or(status::NOT_READY);
            let seconds = time(end)? - time(start)?;
            milliseconds.set((seconds * 1e3) as f32)
        })
    }

    fn cuEventDestroy_v2(event: Handle) {
        call(|machine| machine.events.remove(&event).map(|_| ()).ok_or(status::INVALID_HANDLE))
    }

    fn cuGraphInstantiateWithFlags(exec: Out<Handle>, graph: Handle, _flags: c_ulonglong) {
        synchronizing(|machine, _| {
            let graph = machine.graphs.get(&graph).ok_or(status::INVALID_HANDLE)?.clone();
            let handle = machine.handle();
            machine.graphs.insert(handle, graph);
            exec.set(handle)
        })
    }

    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: Out<usize>) {
        call(|machine| {
            if !nodes.is_null() {
                return Err(status::NOT_SUPPORTED);
            }
            let graph = machine.graphs.get(&graph).ok_or(status::INVALID_HANDLE)?;
            count.set(graph.nodes.len())
        })
    }

    fn cuGraphLaunch(exec: Handle, stream: Handle) {
        on_device(|machine, _| machine.launch(exec, stream))
    }

    fn cuGraphExecDestroy(exec: Handle) {
        synchronizing(|machine, _| machine.graphs.remove(&exec).map(|_| ()).ok_or(status::INVALID_HANDLE))
    }

    fn cuGraphDestroy(graph: Handle) {
        call(|machine| machine.graphs.remove(&graph).map(|_| ()).ok_or(status::INVALID_HANDLE))
    }
}
