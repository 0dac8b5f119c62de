//! The table from the type of an op to its kernel, or to another trait that some ops have. Through it,
//! executors and passes name no op, and programs no device.

use crate::Op;
use std::any::{Any, TypeId};
use std::collections::HashMap;

type Find<K> = Box<dyn for<'a> Fn(&'a dyn Any) -> &'a K + Send + Sync>;

/// The kernels of one kind of device, by op. `K` is its kernel trait, for example `dyn CpuKernel`, or another
/// trait of some ops, such as [`crate::RaggedOp`].
pub struct KernelTable<K: ?Sized> {
    kernels: HashMap<TypeId, Find<K>>,
}

impl<K: ?Sized + 'static> Default for KernelTable<K> {
    fn default() -> Self {
        KernelTable { kernels: HashMap::new() }
    }
}

impl<K: ?Sized + 'static> KernelTable<K> {
    /// Registers the kernel of op `T`. `view` is the coercion `|op| op`.
    pub fn register<T: Op>(&mut self, view: for<'a> fn(&'a T) -> &'a K) {
        let find: Find<K> = Box::new(move |any| match any.downcast_ref::<T>() {
            Some(op) => view(op),
            None => unreachable!("a kernel is found by the type under which it was registered"),
        });
        self.kernels.insert(TypeId::of::<T>(), find);
    }

    /// The kernel of `op`, or `None` if the device has none.
    pub fn find<'a>(&self, op: &'a dyn Op) -> Option<&'a K> {
        let any: &dyn Any = op;
        self.kernels.get(&any.type_id()).map(|find| find(any))
    }
}
