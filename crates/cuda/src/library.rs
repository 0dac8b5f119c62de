//! The search for NVIDIA's shared libraries.
//!
//! Of all files with the right name, the newest is opened: the name contains the major release, and newer
//! minor releases are compatible. The search covers the folders in `XTRAIN_CUDA_LIBRARIES` (if one has the
//! file, the search ends there), the loader's places (`LD_LIBRARY_PATH`, ld.so.cache), CUDA toolkits, and the
//! `nvidia/*/lib` folders that pip installs, in the active virtual or conda environment and in the system's
//! Pythons.

use std::collections::BTreeSet;
use std::env;
use std::error::Error as _;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The variable with folders to search first, separated by `:`.
const FOLDERS_VARIABLE: &str = "XTRAIN_CUDA_LIBRARIES";

/// The loader's message for a file that does not exist.
const NO_FILE: &str = "cannot open shared object file: No such file";

/// One of NVIDIA's libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// The driver's API.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// GEMMs.
    CublasLt,
    /// Attention.
    Cudnn,
    /// Collectives.
    Nccl,
}

/// A library that cannot be used, with the reason and the remedy.
#[derive(Clone, Error, PartialEq, Eq)]
#[error("{library} ({}) {problem}; {}", library.file_name(), library.remedy())]
pub struct Missing {
    /// The library.
    pub library: Library,
    /// The reason.
    pub problem: String,
}

xtrain_tensor::debug_as_display!(Missing);

impl Library {
    /// All libraries, in the order in which they depend on each other.
    pub const ALL: [Library; 5] =
        [Library::Driver, Library::Nvrtc, Library::CublasLt, Library::Cudnn, Library::Nccl];

    /// The file name, with the major release that xtrain is written for.
    pub const fn file_name(self) -> &'static str {
        match self {
            Library::Driver => "libcuda.so.1",
            Library::Nvrtc => "libnvrtc.so.13",
            Library::CublasLt => "libcublasLt.so.13",
            Library::Cudnn => "libcudnn.so.9",
            Library::Nccl => "libnccl.so.2",
        }
    }

    /// The way to get the library.
    pub const fn remedy(self) -> &'static str {
        match self {
            Library::Driver => "install NVIDIA's driver, 580 or newer",
            Library::Nvrtc => "`pip install nvidia-cuda-nvrtc` or install a CUDA 13 toolkit",
            Library::CublasLt => "`pip install nvidia-cublas` or install a CUDA 13 toolkit",
            Library::Cudnn => "`pip install nvidia-cudnn-cu13`",
            Library::Nccl => "`pip install nvidia-nccl-cu13`",
        }
    }

    /// The consequence of a missing library.
    pub const fn without(self) -> &'static str {
        match self {
            Library::Driver => "no GPU can be used",
            Library::Nvrtc => "no kernel can be compiled, so no GPU is used",
            Library::CublasLt => "GEMMs cannot run on a GPU, so no GPU is used",
            Library::Cudnn => "attention runs by xtrain's own kernels alone, which may be slower",
            Library::Nccl => "collectives between GPUs pass through host memory, which is slow",
        }
    }

    /// The places to search, in order; folders that do not exist are left out.
    pub fn places(self) -> Vec<String> {
        let of_folder = |folder: &PathBuf| {
            let why_not = fault(folder).map_or_else(String::new, |why| format!(": {why}"));
            format!("{} ({FOLDERS_VARIABLE}){why_not}", folder.display())
        };
        let mut places: Vec<String> = named_folders().iter().map(of_folder).collect();
        if self != Library::Driver {
            let folders = toolkit_folders().into_iter().filter(|folder| folder.is_dir());
            // A link to another folder of the list would repeat that folder.
            let mut seen = BTreeSet::new();
            let folders = folders.filter(|folder| seen.insert(fs::canonicalize(folder).ok()));
            places.extend(folders.map(|folder| folder.display().to_string()));
            let packages = site_packages().into_iter().filter(|site| site.is_dir());
            places.extend(packages.map(|site| site.join("nvidia/*/lib").display().to_string()));
        }
        places.push("the loader's own places (LD_LIBRARY_PATH, ld.so.cache)".into());
        places
    }

    /// Opens the newest file. The file stays open while the returned library lives.
    pub(crate) fn open(self) -> Result<(libloading::Library, PathBuf), Missing> {
        let mut refusals = Vec::new();
        for path in self.candidates() {
            // NVRTC looks for its companion in the loader's places only.
            if self == Library::Nvrtc {
                open_companions(&path, "libnvrtc-builtins.so.13");
            }
            match open_file(&path) {
                Ok(library) => {
                    let path = loaded_path(self.file_name()).unwrap_or(path);
                    tracing::debug!("{self}: {}", path.display());
                    return Ok((library, path));
                }
                // The loader knows no file of this bare name.
                Err(reason) if reason.starts_with(&format!("{}: {NO_FILE}", self.file_name())) => {}
                Err(reason) => refusals.push(reason),
            }
        }
        let problem = match refusals.into_iter().next() {
            None => "was not found".to_owned(),
            Some(reason) => format!("cannot be opened: {reason}"),
        };
        Err(Missing { library: self, problem })
    }

    /// The files to try, best first. The last is the bare name, which the loader resolves; it is left out if
    /// a named folder has the file.
    fn candidates(self) -> Vec<PathBuf> {
        let name = self.file_name();
        let named = named_folders().into_iter().map(|folder| folder.join(name));
        let named: Vec<PathBuf> = named.filter(|path| path.is_file()).collect();
        if !named.is_empty() {
            return named;
        }
        let mut all = Vec::new();
        if self != Library::Driver {
            all = toolkit_folders()
                .into_iter()
                .chain(site_packages().iter().flat_map(|site| entries(&site.join("nvidia"), "lib")))
                .map(|folder| folder.join(name))
                .filter(|path| path.is_file())
                .collect();
            // The sort is stable: of equal versions the first found stays first.
            all.sort_by_key(|path| std::cmp::Reverse(version_of(path)));
        }
        all.push(name.into());
        all
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Library::Driver => "NVIDIA's driver",
            Library::Nvrtc => "NVRTC",
            Library::CublasLt => "cuBLASLt",
            Library::Cudnn => "cuDNN",
            Library::Nccl => "NCCL",
        })
    }
}

/// The folders in [`FOLDERS_VARIABLE`], without empty names.
fn named_folders() -> Vec<PathBuf> {
    let named = env::var_os(FOLDERS_VARIABLE).unwrap_or_default();
    env::split_paths(&named).filter(|folder| !folder.as_os_str().is_empty()).collect()
}

/// The problems of `XTRAIN_CUDA_LIBRARIES` and of each folder in it, a sentence each.
pub fn named_folder_faults() -> Vec<String> {
    let folders = named_folders();
    if folders.is_empty() && env::var_os(FOLDERS_VARIABLE).is_some() {
        return vec![format!("{FOLDERS_VARIABLE} is set and names no folder; unset it")];
    }
    let sentence =
        |folder: &PathBuf| Some(format!("{FOLDERS_VARIABLE} names {}: {}", folder.display(), fault(folder)?));
    folders.iter().filter_map(sentence).collect()
}

/// The reason why `folder` provides no library; None if it provides one.
fn fault(folder: &Path) -> Option<String> {
    if let Err(error) = fs::metadata(folder) {
        return Some(match fs::read_link(folder) {
            Ok(target) => format!("a link to {}, which cannot be followed ({error})", target.display()),
            Err(_) => format!("cannot be read ({error})"),
        });
    }
    if !folder.is_dir() {
        return Some("a file, where a folder is needed".to_owned());
    }
    if let Err(error) = fs::read_dir(folder) {
        return Some(format!("cannot be read ({error})"));
    }
    let files = Library::ALL.map(|library| folder.join(library.file_name()));
    let astray: Vec<&PathBuf> = files.iter().filter(|file| file.is_symlink() && !file.exists()).collect();
    match astray.first() {
        Some(link) => Some(format!("{} in it is a broken link", link.file_name()?.display())),
        None if files.iter().any(|file| file.is_file()) => None,
        None => Some("holds none of NVIDIA's libraries by the names that are looked for".to_owned()),
    }
}

fn open_file(path: &Path) -> Result<libloading::Library, String> {
    use libloading::os::unix;
    // SAFETY: initialisers of NVIDIA's libraries run, which may be run at any time. Symbols are global so
    // that libraries that open each other by name (cuDNN its engines, and those cuBLASLt) find what is open
    // already.
    let opened = unsafe { unix::Library::open(Some(path), unix::RTLD_NOW | unix::RTLD_GLOBAL) };
    // The loader's own message is the error's source.
    let words =
        |error: libloading::Error| error.source().map_or_else(|| error.to_string(), ToString::to_string);
    opened.map(Into::into).map_err(words)
}

/// Opens the files beside `path` whose names begin with `prefix`, and keeps them open.
fn open_companions(path: &Path, prefix: &str) {
    let Some(folder) = path.parent().and_then(|folder| fs::read_dir(folder).ok()) else { return };
    let names = folder.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    for entry in names {
        if let Ok(library) = open_file(&entry.path()) {
            std::mem::forget(library);
        }
    }
}

/// The file of this name that the process has mapped, from `/proc/self/maps`.
fn loaded_path(name: &str) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    // The mapped file may have its full version in its name: libcublasLt.so.13.1.0.3.
    let path = maps.lines().filter_map(|line| line.split_once('/')).map(|(_, path)| format!("/{path}"));
    path.map(PathBuf::from).find(|path| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
        file.starts_with(name) || (name == Library::Driver.file_name() && file.starts_with(stem))
    })
}

/// The version from the library's file name or, for a file that pip installed, from its package. The highest
/// wins.
fn version_of(path: &Path) -> Vec<u32> {
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = real.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let own = numbers(name.split_once(".so.").map_or("", |(_, version)| version));
    if own.len() > 1 {
        return own;
    }
    // site-packages/nvidia/<package>/lib/<file> belongs to
    // site-packages/nvidia_<package>*-<version>.dist-info.
    let package = || {
        let folder = path.parent()?.parent()?;
        let site = folder.parent()?.parent()?;
        let stem = name.trim_start_matches("lib").split('.').next()?.to_lowercase();
        let info = fs::read_dir(site).ok()?.flatten().filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().to_lowercase();
            let (package, version) = name.strip_suffix(".dist-info")?.split_once('-')?;
            let names = [stem.as_str(), stem.trim_end_matches("lt")];
            let fits = names.iter().any(|stem| package.starts_with("nvidia_") && package.contains(stem));
            fits.then(|| numbers(version))
        });
        // Packages for other major releases may be installed too.
        info.filter(|version| own.is_empty() || version.first() == own.first()).max()
    };
    package().unwrap_or(own)
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

/// The library folders of CUDA toolkits and of distributions.
fn toolkit_folders() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"]
        .iter()
        .filter_map(env::var_os)
        .map(PathBuf::from)
        .collect();
    roots.push("/usr/local/cuda".into());
    let local = fs::read_dir("/usr/local").into_iter().flatten().flatten().map(|entry| entry.path());
    roots.extend(
        local.filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cuda-13"))
        }),
    );
    let inside = ["lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"];
    let mut folders: Vec<PathBuf> =
        roots.iter().flat_map(|root| inside.iter().map(move |folder| root.join(folder))).collect();
    folders
        .extend(["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"].map(PathBuf::from));
    folders
}

/// The folders that pip installs to: the active environments first, then the Pythons of the system and of the
/// user.
fn site_packages() -> Vec<PathBuf> {
    let set = |name: &str| env::var_os(name).map(PathBuf::from);
    let home = set("HOME").map(|home| home.join(".local"));
    // A virtual environment's python3 is a link to the system's: both have packages.
    let pythons = env::var_os("PATH").into_iter().flat_map(|path| {
        env::split_paths(&path)
            .map(|bin| bin.join("python3"))
            .filter(|python| python.exists())
            .collect::<Vec<_>>()
    });
    let prefixes = pythons.flat_map(|python| [Some(python.clone()), fs::canonicalize(python).ok()]).flatten();
    let prefixes = prefixes.filter_map(|python| Some(python.parent()?.parent()?.to_owned()));
    let roots = [set("VIRTUAL_ENV"), set("CONDA_PREFIX")].into_iter().flatten().chain(prefixes);
    // pyenv's python3 on the path is a script without packages beside it.
    let pyenv = set("PYENV_ROOT").or_else(|| set("HOME").map(|home| home.join(".pyenv")));
    let pyenv = pyenv.iter().flat_map(|root| entries(&root.join("versions"), ""));
    let roots: Vec<PathBuf> =
        roots.chain(pyenv).chain(home).chain(["/usr/local".into(), "/usr".into()]).collect();
    let mut seen = BTreeSet::new();
    let mut sites = Vec::new();
    for root in roots {
        for kind in ["site-packages", "dist-packages"] {
            let found =
                entries(&root.join("lib"), kind).into_iter().chain([root.join("lib/python3").join(kind)]);
            sites.extend(found.filter(|site| seen.insert(site.clone())));
        }
    }
    sites
}

/// The folders `folder/*/inner` that exist, sorted.
fn entries(folder: &Path, inner: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.map(|entry| entry.path().join(inner)).filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_the_file_or_from_its_package() {
        let folder = tempfile::tempdir().unwrap();
        let toolkit = folder.path().join("libcudnn.so.9.14.0");
        fs::write(&toolkit, b"").unwrap();
        assert_eq!(version_of(&toolkit), [9, 14, 0]);
        let lib = folder.path().join("nvidia/cudnn/lib");
        fs::create_dir_all(&lib).unwrap();
        fs::write(lib.join("libcudnn.so.9"), b"").unwrap();
        for package in [
            "nvidia_cudnn_cu13-9.19.0.56.dist-info",
            "nvidia_cudnn_cu12-8.9.7.dist-info",
            "numpy-2.4.dist-info",
        ] {
            fs::create_dir(folder.path().join(package)).unwrap();
        }
        assert_eq!(version_of(&lib.join("libcudnn.so.9")), [9, 19, 0, 56]);
    }

    #[test]
    fn what_is_wrong_with_a_folder_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let said = |name: &str| fault(&at(name)).unwrap_or_default();
        assert!(said("none").starts_with("cannot be read (No such file"));
        fs::write(at("file"), b"").unwrap();
        assert_eq!(said("file"), "a file, where a folder is needed");
        std::os::unix::fs::symlink(at("none"), at("link")).unwrap();
        assert!(said("link").starts_with(&format!("a link to {}, which cannot", at("none").display())));
        fs::create_dir(at("libraries")).unwrap();
        assert!(said("libraries").starts_with("holds none of NVIDIA's libraries"));
        fs::write(at("libraries/libcudnn.so.9"), b"").unwrap();
        assert_eq!(fault(&at("libraries")), None);
        std::os::unix::fs::symlink(at("none"), at("libraries/libnvrtc.so.13")).unwrap();
        assert_eq!(said("libraries"), "libnvrtc.so.13 in it is a broken link");
    }

    #[test]
    fn what_is_missing_says_how_to_get_it() {
        let missing = Missing { library: Library::Nccl, problem: "was not found".into() };
        let text = "NCCL (libnccl.so.2) was not found; `pip install nvidia-nccl-cu13`";
        assert_eq!(missing.to_string(), text);
    }
}
