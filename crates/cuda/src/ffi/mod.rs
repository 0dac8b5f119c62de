//! Foreign functions, as tables of pointers into libraries that are opened at run time.

pub(crate) mod cublaslt;
pub(crate) mod cudnn;
pub(crate) mod driver;
pub(crate) mod nccl;
pub(crate) mod nvrtc;
pub(crate) mod open;

/// Declares a table of foreign functions: a struct with one pointer per symbol, filled from an open library.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        $table:ident {
            $( fn $name:ident( $($arg:ident : $ty:ty),* $(,)? ) -> $ret:ty; )*
        }
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        pub(crate) struct $table {
            $( pub(crate) $name: unsafe extern "C" fn($($ty),*) -> $ret, )*
            /// Keeps the pointers valid.
            _library: libloading::Library,
        }

        impl $table {
            /// Looks up all symbols. The error is the name of the first one that is missing.
            pub(crate) fn load(library: libloading::Library) -> Result<Self, &'static str> {
                Ok($table {
                    $(
                        $name: {
                            // SAFETY: the symbol is a function of this signature in every release of the
                            // library that carries the versioned file name under which it was opened; the
                            // pointer lives as long as `_library`.
                            let symbol = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                            *symbol.map_err(|_| stringify!($name))?
                        },
                    )*
                    _library: library,
                })
            }
        }
    };
}
pub(crate) use functions;
