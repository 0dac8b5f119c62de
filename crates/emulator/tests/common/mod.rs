//! The emulator as a program meets it: a folder of links under the names of NVIDIA's libraries.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]
#![allow(unsafe_code, reason = "it sets variables of the environment and calls a foreign function")]

use std::error::Error;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

/// The shared library, which cargo builds beside the tests.
pub fn library() -> Result<PathBuf, Box<dyn Error>> {
    let test = std::env::current_exe()?;
    let folders = test.ancestors().skip(1);
    let found = folders.map(|folder| folder.join("libxtrain_emulator.so")).find(|path| path.is_file());
    found.ok_or_else(|| "libxtrain_emulator.so is not built: `cargo build -p xtrain-emulator`".into())
}

/// Has this process find the emulator in the place of NVIDIA's libraries, which it must not have opened yet.
pub fn emulated() -> Result<tempfile::TempDir, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    for name in ["libcuda.so.1", "libcublasLt.so.13", "libnvrtc.so.13"] {
        symlink(library()?, folder.path().join(name))?;
    }
    // Nothing opens as these, so that real ones are not looked for elsewhere.
    for name in ["libcudnn.so.9", "libnccl.so.2"] {
        std::fs::write(folder.path().join(name), [])?;
    }
    // SAFETY: called before there are other threads.
    unsafe { std::env::set_var("XTRAIN_CUDA_LIBRARIES", folder.path()) };
    // SAFETY: as above.
    unsafe { std::env::set_var("XTRAIN_CACHE", folder.path().join("cache")) };
    Ok(folder)
}

/// How many instructions warps have executed in this process.
pub fn steps() -> Result<u64, Box<dyn Error>> {
    // SAFETY: the library is open already; nothing is initialised again.
    let library = unsafe { libloading::Library::new(library()?) }?;
    // SAFETY: the function takes nothing and returns a number.
    let steps = unsafe { library.get::<unsafe extern "C" fn() -> u64>(b"xtrain_emulator_steps\0") }?;
    // SAFETY: as above.
    Ok(unsafe { steps() })
}
