//! NVRTC: compiles CUDA C++ to machine code for one architecture, in this process.

use crate::arch::Arch;
use crate::error::CudaError;
use crate::ffi::nvrtc::{NVRTC_ERROR_COMPILATION, NVRTC_SUCCESS, Nvrtc, NvrtcProgram};
use crate::ffi::open::{Opened, c_string, nvrtc};
use std::ffi::{CString, c_char, c_int};
use std::path::Path;

/// The compiler.
#[derive(Clone, Copy)]
pub struct Compiler {
    opened: &'static Opened<Nvrtc>,
    version: (u32, u32),
}

/// Machine code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// An ELF image for one architecture.
    pub cubin: Vec<u8>,
    /// The compiler's messages; with `--ptxas-options=-v` also the resources of each kernel.
    pub log: String,
}

impl Compiler {
    /// Opens NVRTC. It needs no GPU.
    pub fn open() -> Result<Compiler, CudaError> {
        let opened = nvrtc()?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        let status = unsafe { (opened.table.nvrtcVersion)(&mut major, &mut minor) };
        let compiler = Compiler { opened, version: (major as u32, minor as u32) };
        compiler.check("nvrtcVersion", status)?;
        Ok(Compiler { version: (major as u32, minor as u32), ..compiler })
    }

    /// The version: (13, 0) for CUDA 13.0.
    pub fn version(self) -> (u32, u32) {
        self.version
    }

    /// The file of the library.
    pub fn path(self) -> &'static Path {
        &self.opened.path
    }

    /// Compiles `source`. `name` is the file name in messages.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's messages.
    pub fn compile(
        self,
        name: &str,
        source: &str,
        arch: Arch,
        options: &[String],
    ) -> Result<Compiled, CudaError> {
        let nvrtc = &self.opened.table;
        let text = |text: &str| {
            CString::new(text).map_err(|_| CudaError::Compile {
                name: name.into(),
                arch: arch.to_string(),
                log: "a zero byte in the source or an option".into(),
            })
        };
        let (c_source, c_name) = (text(source)?, text(name)?);
        let target = format!("--gpu-architecture={arch}");
        let options: Vec<CString> = std::iter::once(target.as_str())
            .chain(options.iter().map(String::as_str))
            .map(text)
            .collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();

        let mut program = SourceProgram { nvrtc, handle: std::ptr::null_mut() };
        // SAFETY: the strings end with zeros and are copied; no headers.
        let status = unsafe {
            (nvrtc.nvrtcCreateProgram)(
                &mut program.handle,
                c_source.as_ptr(),
                c_name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        self.check("nvrtcCreateProgram", status)?;
        // SAFETY: the program was created above; as many pointers as the count says, to strings that end with
        // zeros.
        let status = unsafe {
            (nvrtc.nvrtcCompileProgram)(program.handle, pointers.len() as c_int, pointers.as_ptr())
        };
        let log = self.fetch(
            &program,
            "nvrtcGetProgramLog",
            nvrtc.nvrtcGetProgramLogSize,
            nvrtc.nvrtcGetProgramLog,
        )?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        if status == NVRTC_ERROR_COMPILATION {
            return Err(CudaError::Compile { name: name.into(), arch: arch.to_string(), log });
        }
        self.check("nvrtcCompileProgram", status)?;
        let cubin = self.fetch(&program, "nvrtcGetCUBIN", nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)?;
        Ok(Compiled { cubin, log })
    }

    /// The bytes that a pair of functions returns, one for the size and one for the contents.
    fn fetch(
        self,
        program: &SourceProgram<'_>,
        call: &'static str,
        size: unsafe extern "C" fn(NvrtcProgram, *mut usize) -> c_int,
        get: unsafe extern "C" fn(NvrtcProgram, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, CudaError> {
        let mut bytes = 0;
        // SAFETY: writes one integer.
        self.check(call, unsafe { size(program.handle, &mut bytes) })?;
        let mut out = vec![0u8; bytes];
        // SAFETY: writes as many bytes as the call before said.
        self.check(call, unsafe { get(program.handle, out.as_mut_ptr().cast::<c_char>()) })?;
        Ok(out)
    }

    fn check(self, call: &'static str, status: c_int) -> Result<(), CudaError> {
        if status == NVRTC_SUCCESS {
            return Ok(());
        }
        // SAFETY: returns a string of the library's own for any number.
        let text = c_string(unsafe { (self.opened.table.nvrtcGetErrorString)(status) });
        Err(CudaError::Library { call, text: text.unwrap_or_else(|| format!("status {status}")) })
    }
}

/// A program being compiled.
struct SourceProgram<'a> {
    nvrtc: &'a Nvrtc,
    handle: NvrtcProgram,
}

impl Drop for SourceProgram<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created once, destroyed once. Nothing can be done where it is refused.
            unsafe { (self.nvrtc.nvrtcDestroyProgram)(&mut self.handle) };
        }
    }
}
