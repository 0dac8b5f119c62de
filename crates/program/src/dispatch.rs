//! The table from an op's type to its kernel, so that executors name no op and programs name no device.

use crate::Op;
use std::any::{Any, TypeId};
use std::collections::HashMap;

type Find<K> = Box<dyn for<'a> Fn(&'a dyn Any) -> &'a K + Send + Sync>;

/// The kernels of one device, by op. `K` is the device's kernel trait, e.g. `dyn CpuKernel`.
pub struct KernelTable<K: ?Sized> {
    kernels: HashMap<TypeId, Find<K>>,
}

impl<K: ?Sized + 'static> Default for KernelTable<K> {
    fn default() -> Self {
        KernelTable { kernels: HashMap::new() }
    }
}

impl<K: ?Sized + 'static> KernelTable<K> {
    /// Registers the kernel of op `T`; `view` is the coercion `|op| op`.
    pub fn register<T: Op>(&mut self, view: for<'a> fn(&'a T) -> &'a K) {
        let find: Find<K> = Box::new(move |any| match any.downcast_ref::<T>() {
            Some(op) => view(op),
            None => unreachable!("kernels are looked up by the type they were registered under"),
        });
        self.kernels.insert(TypeId::of::<T>(), find);
    }

    /// The kernel of `op`, or None if this device has none.
    pub fn find<'a>(&self, op: &'a dyn Op) -> Option<&'a K> {
        let any: &dyn Any = op;
        self.kernels.get(&any.type_id()).map(|find| find(any))
    }
}
