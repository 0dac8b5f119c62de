//! [`debug_as_display`](crate::debug_as_display).

/// Implements `Debug` of an error type by its message: `fn main() -> Result<(), Box<dyn Error>>` ends with
/// the `Debug` of its error, where users look for what is wrong and what to do.
#[macro_export]
macro_rules! debug_as_display {
    ($error:ty) => {
        impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        }
    };
}
