//! `libcublasLt.so.13`: the functions that xtrain calls, with the statuses of the cuBLAS documentation.

use super::{Handle, In, Out, driver, export};
use crate::gemm::operation::{CallOperands, GemmOperation};
use crate::gemm::{Algorithm, Desc, Element, GemmLayout, Objects, Preference, Refusal};
use crate::machine::{self, Machine};
use crate::work::WorkItem;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

/// `cublasLtMatmulAlgo_t`.
type Algo = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
struct HeuristicResult {
    algo: Algo,
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

impl From<Algorithm> for HeuristicResult {
    fn from(algorithm: Algorithm) -> HeuristicResult {
        let workspace_bytes = algorithm.workspace_bytes() as usize;
        HeuristicResult { algo: algorithm.words(), workspace_bytes, state: 0, waves: 1.0, reserved: [0; 4] }
    }
}

/// Runs a call; returns the status number of its refusal, or 0.
fn call(body: impl FnOnce(&mut Machine) -> Result<(), Refusal>) -> c_int {
    let mut machine = machine::lock();
    let Some(machine) = &mut *machine else { return Refusal::NotInitialized as c_int };
    body(machine).map_or_else(|refusal| refusal as c_int, |()| 0)
}

/// The bytes of an attribute.
///
/// # Safety
/// `value` is null or valid for as many bytes.
unsafe fn attribute<'a>(value: *const c_void, bytes: usize) -> Result<&'a [u8], Refusal> {
    if value.is_null() {
        return Err(Refusal::InvalidValue);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(value.cast::<u8>(), bytes) })
}

/// Stores a new object in one of the tables and writes its handle.
fn create<T>(
    machine: &mut Machine,
    to: Out<Handle>,
    object: T,
    table: fn(&mut Objects) -> &mut HashMap<Handle, T>,
) -> Result<(), Refusal> {
    let handle = machine.handle();
    table(&mut machine.blas).insert(handle, object);
    Ok(to.set(handle)?)
}

/// The GEMM of a descriptor and layouts, and the device of the library's handle. In a thread without a
/// context, the real library uses the first GPU, and makes a context of some 500 MiB there; here that fails.
fn gemm(
    machine: &Machine,
    library: Handle,
    desc: Handle,
    layouts: [Handle; 4],
) -> Result<(GemmOperation, usize), Refusal> {
    let device = *machine.blas.libraries.get(&library).ok_or(Refusal::NotInitialized)?;
    if driver::current() != Some(device) {
        return Err(Refusal::NotInitialized);
    }
    let desc = *machine.blas.descs.get(&desc).ok_or(Refusal::InvalidValue)?;
    let layout = |of: Handle| machine.blas.layouts.get(&of).copied().ok_or(Refusal::InvalidValue);
    let [a, b, c, d] = layouts.map(layout);
    Ok((GemmOperation::new(machine.settings.arch, desc, [a?, b?, c?, d?])?, device))
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
extern "C" fn cublasLtGetVersion() -> usize {
    130_100
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVIDIA's name")]
extern "C" fn cublasLtGetStatusString(status: c_int) -> *const c_char {
    const TEXTS: [(c_int, &CStr); 5] = [
        (0, c"success"),
        (Refusal::NotInitialized as c_int, c"the library was not initialized"),
        (Refusal::InvalidValue as c_int, c"an unsupported value or parameter was passed to the function"),
        (Refusal::ExecutionFailed as c_int, c"the GPU program failed to execute"),
        (Refusal::NotSupported as c_int, c"the functionality requested is not supported"),
    ];
    TEXTS.iter().find(|(of, _)| *of == status).map_or(c"unknown status", |(_, text)| text).as_ptr()
}

export! {
    fn cublasLtCreate(handle: Out<Handle>) {
        call(|machine| {
            let device = driver::current().ok_or(Refusal::NotInitialized)?;
            machine.may_synchronize(std::thread::current().id())?;
            create(machine, handle, device, |of| &mut of.libraries)
        })
    }

    fn cublasLtDestroy(handle: Handle) {
        call(|machine| {
            machine.may_synchronize(std::thread::current().id())?;
            machine.blas.libraries.remove(&handle).map(drop).ok_or(Refusal::NotInitialized)
        })
    }

    fn cublasLtMatmulDescCreate(desc: Out<Handle>, compute: c_int, scale: c_int) {
        call(|machine| create(machine, desc, Desc::new(compute, scale)?, |of| &mut of.descs))
    }

    fn cublasLtMatmulDescDestroy(desc: Handle) {
        call(|machine| machine.blas.descs.remove(&desc).map(drop).ok_or(Refusal::InvalidValue))
    }

    fn cublasLtMatmulDescSetAttribute(desc: Handle, number: c_int, value: *const c_void, bytes: usize) {
        call(|machine| {
            // SAFETY: the caller's pointer and length.
            let value = unsafe { attribute(value, bytes) }?;
            machine.blas.descs.get_mut(&desc).ok_or(Refusal::InvalidValue)?.set(number, value)
        })
    }

    fn cublasLtMatrixLayoutCreate(layout: Out<Handle>, element: c_int, rows: u64, columns: u64, leading: i64) {
        call(|machine| {
            let leading = usize::try_from(leading).map_err(|_| Refusal::InvalidValue)?;
            let (element, rows, columns) = (Element::new(element)?, rows as usize, columns as usize);
            create(machine, layout, GemmLayout { element, rows, columns, leading }, |of| &mut of.layouts)
        })
    }

    fn cublasLtMatrixLayoutDestroy(layout: Handle) {
        call(|machine| machine.blas.layouts.remove(&layout).map(drop).ok_or(Refusal::InvalidValue))
    }

    fn cublasLtMatmulPreferenceCreate(preference: Out<Handle>) {
        call(|machine| create(machine, preference, Preference::default(), |of| &mut of.preferences))
    }

    fn cublasLtMatmulPreferenceDestroy(preference: Handle) {
        call(|machine| machine.blas.preferences.remove(&preference).map(drop).ok_or(Refusal::InvalidValue))
    }

    fn cublasLtMatmulPreferenceSetAttribute(preference: Handle, number: c_int, value: *const c_void, bytes: usize) {
        call(|machine| {
            // SAFETY: the caller's pointer and length.
            let value = unsafe { attribute(value, bytes) }?;
            machine.blas.preferences.get_mut(&preference).ok_or(Refusal::InvalidValue)?.set(number, value)
        })
    }

    fn cublasLtMatmulAlgoGetHeuristic(
        handle: Handle, desc: Handle, a: Handle, b: Handle, c: Handle, d: Handle, preference: Handle,
        asked: c_int, results: Out<HeuristicResult>, found: Out<c_int>,
    ) {
        call(|machine| {
            found.set(0)?;
            let preference = machine.blas.preferences.get(&preference).ok_or(Refusal::InvalidValue)?;
            let (gemm, _) = gemm(machine, handle, desc, [a, b, c, d])?;
            if asked < 1 || results.0.is_null() {
                return Err(Refusal::InvalidValue);
            }
            let algorithms = gemm.algorithms(preference);
            let count = algorithms.len().min(asked as usize);
            for (n, algorithm) in algorithms.into_iter().take(count).enumerate() {
                // The caller's array has as many results as are asked for.
                Out(results.0.wrapping_add(n)).set(algorithm.into())?;
            }
            found.set(count as c_int)?;
            if count > 0 { Ok(()) } else { Err(Refusal::NotSupported) }
        })
    }

    fn cublasLtMatmulAlgoCheck(
        handle: Handle, desc: Handle, a: Handle, b: Handle, c: Handle, d: Handle,
        algo: In<Algo>, result: Out<HeuristicResult>,
    ) {
        call(|machine| {
            let algorithm = Algorithm::decode(algo.get()?)?;
            gemm(machine, handle, desc, [a, b, c, d])?;
            Ok(result.set(algorithm.into())?)
        })
    }

    fn cublasLtMatmulAlgoConfigGetAttribute(
        algo: In<Algo>, attribute: c_int, value: Out<u32>, bytes: usize, written: Out<usize>,
    ) {
        call(|_| {
            let algorithm = Algorithm::decode(algo.get()?)?;
            // CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME
            if attribute != 3 || bytes != size_of::<u32>() {
                return Err(Refusal::InvalidValue);
            }
            value.set(algorithm.reduction())?;
            Ok(written.set(size_of::<u32>())?)
        })
    }

    fn cublasLtMatmul(
        handle: Handle, desc: Handle, alpha: In<f32>, a: u64, a_layout: Handle, b: u64, b_layout: Handle,
        beta: In<f32>, c: u64, c_layout: Handle, d: u64, d_layout: Handle, algo: In<Algo>,
        workspace: u64, workspace_bytes: usize, stream: Handle,
    ) {
        call(|machine| {
            let (gemm, device) = gemm(machine, handle, desc, [a_layout, b_layout, c_layout, d_layout])?;
            let algorithm = Algorithm::decode(algo.get()?)?;
            let operands = CallOperands {
                alpha: alpha.get()?,
                beta: beta.get()?,
                matrices: [a, b, c, d],
                workspace,
                workspace_bytes: workspace_bytes as u64,
            };
            if machine.streams.get(&stream).is_none_or(|stream| stream.device != device) {
                return Err(Refusal::InvalidValue);
            }
            machine.check(device)?;
            let work = gemm.work(algorithm, operands)?;
            Ok(machine.put(stream, WorkItem::Gemm(Arc::new(work)))?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null, null_mut};

    /// Handles of a descriptor and of one layout for all four matrices of an f32 GEMM.
    fn described() -> (Handle, Handle) {
        let (mut desc, mut layout) = (0, 0);
        // SAFETY: writes a handle.
        assert_eq!(unsafe { cublasLtMatmulDescCreate(Out(&mut desc), 68, 0) }, 0);
        // SAFETY: writes a handle.
        assert_eq!(unsafe { cublasLtMatrixLayoutCreate(Out(&mut layout), 0, 16, 16, 16) }, 0);
        (desc, layout)
    }

    #[test]
    fn null_pointers_and_unknown_handles_are_refused() {
        let (desc, layout) = described();
        let one = 1i32;
        // SAFETY: reads four bytes.
        let set = |desc, value: *const i32| unsafe {
            cublasLtMatmulDescSetAttribute(desc, 3, value.cast::<c_void>(), 4)
        };
        assert_eq!((set(desc, &one), set(desc, null()), set(0, &one)), (0, 7, 7));
        // SAFETY: the thread has no context, so nothing is written.
        assert_eq!(unsafe { cublasLtCreate(Out(&mut 0)) }, 1);
        let words = Algorithm::Whole.words();
        // SAFETY: there is no such library handle, so nothing is written.
        let checked = unsafe {
            cublasLtMatmulAlgoCheck(0, desc, layout, layout, layout, layout, In(&words), Out(null_mut()))
        };
        assert_eq!(checked, 1);
        // SAFETY: destroyed once, and then there is none.
        let destroyed = [(); 2].map(|()| unsafe { cublasLtMatrixLayoutDestroy(layout) });
        assert_eq!(destroyed, [0, 7]);
    }

    #[test]
    fn an_algorithm_reports_its_reduction_scheme() {
        let reduction = |words: Algo| {
            let (mut scheme, mut written) = (9u32, 0);
            let (value, bytes) = (Out(&mut scheme), Out(&mut written));
            // SAFETY: writes two numbers.
            let status = unsafe { cublasLtMatmulAlgoConfigGetAttribute(In(&words), 3, value, 4, bytes) };
            (status, scheme, written)
        };
        assert_eq!(reduction(Algorithm::Whole.words()), (0, 0, 4));
        assert_eq!(reduction(Algorithm::Split.words()), (0, 2, 4));
        assert_eq!(reduction([1; 8]), (7, 9, 0));
    }
}
