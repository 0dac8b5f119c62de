//! Structures that kernels read. [`kernel_struct`](crate::kernel_struct) declares one in Rust; the CUDA
//! source declares its twin, with the same names, and compiles the assertions that compare size and offsets.

/// A value that a kernel reads from its arguments or from memory: a number, an address, or a structure of
/// these. Types without a fixed layout do not implement it, so they cannot cross to a kernel.
pub trait KernelValue: Copy {
    /// The layout of a structure; None for numbers and addresses.
    const LAYOUT: Option<&'static StructLayout> = None;

    /// Writes the value to memory of its size that holds zeros. Padding is skipped.
    fn write_to(&self, to: &mut [u8]);
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl KernelValue for $number {
            fn write_to(&self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_ne_bytes());
            }
        }
    )*};
}

numbers!(u32, i32, u64, f32, f64);

impl KernelValue for crate::memory::DevicePtr {
    fn write_to(&self, to: &mut [u8]) {
        self.0.write_to(to);
    }
}

/// The bytes of `values` as an array in GPU memory.
pub fn kernel_bytes<T: KernelValue>(values: &[T]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(values)];
    values.iter().zip(bytes.chunks_exact_mut(size_of::<T>())).for_each(|(value, to)| value.write_to(to));
    bytes
}

/// The macro of the assertions. NVRTC lacks `offsetof`; headers of its front end define it by `__INTADDR__`.
const OFFSET_OF: &str = "#define OFFSET_OF(T, FIELD) ((u64)__INTADDR__(&((T*)0)->FIELD))\n";

/// The layout of a structure on the host.
#[derive(Debug)]
pub struct StructLayout {
    /// The name on both sides.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// The fields in order.
    pub fields: &'static [FieldLayout],
}

/// A field of a [`StructLayout`].
#[derive(Debug)]
pub struct FieldLayout {
    /// The name on both sides.
    pub name: &'static str,
    /// Bytes from the start of the structure.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
    /// The layout of a field that is a structure.
    pub layout: Option<&'static StructLayout>,
}

impl StructLayout {
    /// Assertions in CUDA C++ that the structure has this layout there too.
    fn assertions(&self) -> String {
        let StructLayout { name, size, fields } = self;
        let mut text =
            format!("static_assert(sizeof({name}) == {size}, \"{name}: {size} bytes in Rust\");\n");
        for FieldLayout { name: field, offset, size, .. } in *fields {
            text += &format!(
                "static_assert(OFFSET_OF({name}, {field}) == {offset} && sizeof({name}::{field}) == {size}, \
                 \"{name}::{field}: {size} bytes at {offset} in Rust\");\n"
            );
        }
        text
    }

    /// Adds the structure after those in it, each once.
    fn collect(&'static self, all: &mut Vec<&'static StructLayout>) {
        self.fields.iter().filter_map(|field| field.layout).for_each(|layout| layout.collect(all));
        if all.iter().all(|layout| layout.name != self.name) {
            all.push(self);
        }
    }
}

/// Assertions in CUDA C++ that these structures, and those in them, have there the layouts of the host.
pub(crate) fn assertions(structs: &[&'static StructLayout]) -> String {
    let mut all = Vec::new();
    structs.iter().for_each(|layout| layout.collect(&mut all));
    let texts: Vec<String> = all.into_iter().map(StructLayout::assertions).collect();
    format!("{OFFSET_OF}{}", texts.concat())
}

/// Declares structures that cross to kernels, with the layout of C. Each has a constant `LAYOUT` for
/// [`KernelSource::structs`](crate::KernelSource::structs).
#[macro_export]
macro_rules! kernel_struct {
    ($(
        $(#[$attribute:meta])*
        $visibility:vis struct $name:ident {
            $($(#[$doc:meta])* $field_visibility:vis $field:ident: $type:ty),* $(,)?
        }
    )*) => {$(
        $(#[$attribute])*
        #[derive(Clone, Copy)]
        #[repr(C)]
        $visibility struct $name {
            $($(#[$doc])* $field_visibility $field: $type),*
        }

        impl $name {
            /// The structure on the host, which its CUDA twin must equal.
            $visibility const LAYOUT: &'static $crate::StructLayout = &$crate::StructLayout {
                name: stringify!($name),
                size: size_of::<$name>(),
                fields: &[$($crate::FieldLayout {
                    name: stringify!($field),
                    offset: std::mem::offset_of!($name, $field),
                    size: size_of::<$type>(),
                    layout: <$type as $crate::KernelValue>::LAYOUT,
                }),*],
            };
        }

        impl $crate::KernelValue for $name {
            const LAYOUT: Option<&'static $crate::StructLayout> = Some($name::LAYOUT);

            fn write_to(&self, to: &mut [u8]) {
                $(self.$field.write_to(&mut to[std::mem::offset_of!($name, $field)..][..size_of::<$type>()]);)*
            }
        }
    )*};
}

#[cfg(test)]
mod tests {
    use super::*;

    kernel_struct! {
        struct Inner { a: u32, b: u64 }
        struct Outer { x: f32, inner: Inner }
    }

    #[test]
    fn assertions_name_each_field_and_those_of_structures_inside() {
        let text = assertions(&[Outer::LAYOUT, Inner::LAYOUT]);
        assert_eq!(text.matches("sizeof(Inner) ==").count(), 1, "{text}");
        assert!(text.contains("sizeof(Outer) == 24") && text.contains("sizeof(Inner) == 16"), "{text}");
        assert!(text.contains("OFFSET_OF(Outer, inner) == 8 && sizeof(Outer::inner) == 16"), "{text}");
        assert!(text.contains("OFFSET_OF(Inner, b) == 8 && sizeof(Inner::b) == 8"), "{text}");
    }

    #[test]
    fn bytes_have_the_layout_of_c_and_zeros_as_padding() {
        let value = Outer { x: 1.0, inner: Inner { a: 2, b: 3 } };
        let expected = [1.0f32.to_bits(), 0, 2, 0, 3, 0].map(u32::to_ne_bytes);
        assert_eq!(kernel_bytes(&[value, value]), [expected, expected].concat().concat());
    }
}
