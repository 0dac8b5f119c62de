//! Operation graphs: operations over tensors, in the form that cuDNN's engines recognise.

use super::descriptor::{Descriptor, Dnn};
use crate::error::CudaError;
use crate::ffi::cudnn::{DATA_BOOLEAN, DATA_FLOAT, DATA_INT32, NOT_PROPAGATE_NAN, attribute, kind, ty};
use std::ffi::c_int;
use std::sync::Arc;

/// The alignment of every tensor, in bytes.
const ALIGNMENT: i64 = 16;

/// Four extents, or four strides in elements.
pub(crate) type Dims = [i64; 4];

/// A tensor of a graph, by its index.
#[derive(Clone, Copy)]
pub(crate) struct Tensor(usize);

/// An elementwise operation, numbered as in `cudnnPointwiseMode_t`.
#[derive(Clone, Copy)]
pub(crate) enum Pointwise {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    GreaterOrEqual = 303,
}

/// A reduction over dimensions, numbered as in `cudnnReduceTensorOp_t`.
#[derive(Clone, Copy)]
pub(crate) enum Reduce {
    Add = 0,
    Max = 3,
}

/// The storage of a tensor.
pub(super) enum Data {
    /// Inside an engine, never in memory.
    Virtual,
    /// In memory, at the address with this index among those given to a run.
    At(usize),
    /// A number in host memory, which the library reads here.
    Value(Box<f32>),
}

/// An operation graph being built.
pub(crate) struct GraphBuilder {
    pub(super) dnn: Arc<Dnn>,
    pub(super) tensors: Vec<(Descriptor, Data, Dims)>,
    /// For each operation the descriptors that it refers to, and its own.
    pub(super) operations: Vec<(Vec<Descriptor>, Descriptor)>,
}

impl GraphBuilder {
    pub(crate) fn new(dnn: &Arc<Dnn>) -> GraphBuilder {
        GraphBuilder { dnn: dnn.clone(), tensors: Vec::new(), operations: Vec::new() }
    }

    fn tensor(&mut self, dtype: c_int, dims: Dims, strides: Dims, data: Data) -> Result<Tensor, CudaError> {
        let d = Descriptor::new(&self.dnn, kind::TENSOR)?;
        d.set_int(attribute::TENSOR_DATA_TYPE, ty::DATA_TYPE, dtype)?;
        d.set(attribute::TENSOR_DIMENSIONS, ty::INT64, &dims)?;
        d.set(attribute::TENSOR_STRIDES, ty::INT64, &strides)?;
        d.set(attribute::TENSOR_UNIQUE_ID, ty::INT64, &[self.tensors.len() as i64])?;
        d.set(attribute::TENSOR_ALIGNMENT, ty::INT64, &[ALIGNMENT])?;
        match &data {
            Data::Virtual => d.set(attribute::TENSOR_IS_VIRTUAL, ty::BOOLEAN, &[true])?,
            Data::Value(_) => d.set(attribute::TENSOR_IS_BY_VALUE, ty::BOOLEAN, &[true])?,
            Data::At(_) => {}
        }
        self.tensors.push((d.finalize()?, data, dims));
        Ok(Tensor(self.tensors.len() - 1))
    }

    /// A tensor in memory, at the address with index `place` among those given to a run.
    pub(crate) fn in_memory(
        &mut self,
        dtype: c_int,
        dims: Dims,
        strides: Dims,
        place: usize,
    ) -> Result<Tensor, CudaError> {
        self.tensor(dtype, dims, strides, Data::At(place))
    }

    /// A packed tensor that passes from one operation to the next.
    pub(crate) fn intermediate(&mut self, dtype: c_int, dims: Dims) -> Result<Tensor, CudaError> {
        self.tensor(dtype, dims, packed(dims), Data::Virtual)
    }

    /// A tensor with these strides that passes from one operation to the next.
    pub(crate) fn intermediate_with(
        &mut self,
        dtype: c_int,
        dims: Dims,
        strides: Dims,
    ) -> Result<Tensor, CudaError> {
        self.tensor(dtype, dims, strides, Data::Virtual)
    }

    /// A number.
    pub(crate) fn scalar(&mut self, value: f32) -> Result<Tensor, CudaError> {
        self.tensor(DATA_FLOAT, [1; 4], [1; 4], Data::Value(Box::new(value)))
    }

    /// `to = a b`, a matrix product of the last two dimensions, summed in f32.
    pub(crate) fn matmul(&mut self, a: Tensor, b: Tensor, to: Tensor) -> Result<(), CudaError> {
        let m = Descriptor::new(&self.dnn, kind::MATMUL)?;
        m.set_int(attribute::MATMUL_COMP_TYPE, ty::DATA_TYPE, DATA_FLOAT)?;
        let m = m.finalize()?;
        let op = Descriptor::new(&self.dnn, kind::OPERATION_MATMUL)?;
        op.set_descriptors(attribute::OP_MATMUL_A, &[self.descriptor(a)])?;
        op.set_descriptors(attribute::OP_MATMUL_B, &[self.descriptor(b)])?;
        op.set_descriptors(attribute::OP_MATMUL_C, &[self.descriptor(to)])?;
        op.set_descriptors(attribute::OP_MATMUL_DESCRIPTOR, &[&m])?;
        self.add(vec![m], op)
    }

    /// `to = mode(x)` or `mode(x, b)`, in f32; a comparison computes booleans.
    pub(crate) fn pointwise(
        &mut self,
        mode: Pointwise,
        x: Tensor,
        b: Option<Tensor>,
        to: Tensor,
    ) -> Result<(), CudaError> {
        let precision = if matches!(mode, Pointwise::GreaterOrEqual) { DATA_BOOLEAN } else { DATA_FLOAT };
        let p = self.pointwise_descriptor(mode as c_int, precision, None)?;
        let op = self.pointwise_operation(&p, x, to)?;
        if let Some(b) = b {
            op.set_descriptors(attribute::OP_POINTWISE_B, &[self.descriptor(b)])?;
        }
        self.add(vec![p], op)
    }

    /// `to` = each element's index along `axis` of `x`.
    pub(crate) fn index(&mut self, axis: i64, x: Tensor, to: Tensor) -> Result<(), CudaError> {
        let p = self.pointwise_descriptor(GEN_INDEX, DATA_FLOAT, Some(axis))?;
        let op = self.pointwise_operation(&p, x, to)?;
        self.add(vec![p], op)
    }

    /// `to` = `x` where `mask` is true, else `other`.
    pub(crate) fn select(
        &mut self,
        mask: Tensor,
        x: Tensor,
        other: Tensor,
        to: Tensor,
    ) -> Result<(), CudaError> {
        let p = self.pointwise_descriptor(BINARY_SELECT, DATA_FLOAT, None)?;
        let op = self.pointwise_operation(&p, x, to)?;
        op.set_descriptors(attribute::OP_POINTWISE_B, &[self.descriptor(other)])?;
        op.set_descriptors(attribute::OP_POINTWISE_T, &[self.descriptor(mask)])?;
        self.add(vec![p], op)
    }

    /// `to` = `x` reduced along the dimensions in which `to` is shorter: to one element, or to one for each
    /// group.
    pub(crate) fn reduce(&mut self, operator: Reduce, x: Tensor, to: Tensor) -> Result<(), CudaError> {
        let r = Descriptor::new(&self.dnn, kind::REDUCTION)?;
        r.set_int(attribute::REDUCTION_OPERATOR, ty::REDUCTION_OPERATOR, operator as c_int)?;
        r.set_int(attribute::REDUCTION_COMP_TYPE, ty::DATA_TYPE, DATA_FLOAT)?;
        let r = r.finalize()?;
        let op = Descriptor::new(&self.dnn, kind::OPERATION_REDUCTION)?;
        op.set_descriptors(attribute::OP_REDUCTION_X, &[self.descriptor(x)])?;
        op.set_descriptors(attribute::OP_REDUCTION_Y, &[self.descriptor(to)])?;
        op.set_descriptors(attribute::OP_REDUCTION_DESCRIPTOR, &[&r])?;
        self.add(vec![r], op)
    }

    /// `to` = `x` with other strides or another type.
    pub(crate) fn reshape(&mut self, x: Tensor, to: Tensor) -> Result<(), CudaError> {
        let op = Descriptor::new(&self.dnn, kind::OPERATION_RESHAPE)?;
        op.set_descriptors(attribute::OP_RESHAPE_X, &[self.descriptor(x)])?;
        op.set_descriptors(attribute::OP_RESHAPE_Y, &[self.descriptor(to)])?;
        self.add(Vec::new(), op)
    }

    fn pointwise_descriptor(
        &self,
        mode: c_int,
        precision: c_int,
        axis: Option<i64>,
    ) -> Result<Descriptor, CudaError> {
        let p = Descriptor::new(&self.dnn, kind::POINTWISE)?;
        p.set_int(attribute::POINTWISE_MODE, ty::POINTWISE_MODE, mode)?;
        p.set_int(attribute::POINTWISE_MATH_PREC, ty::DATA_TYPE, precision)?;
        p.set_int(attribute::POINTWISE_NAN_PROPAGATION, ty::NAN_PROPAGATION, NOT_PROPAGATE_NAN)?;
        if let Some(axis) = axis {
            p.set(attribute::POINTWISE_AXIS, ty::INT64, &[axis])?;
        }
        p.finalize()
    }

    fn pointwise_operation(&self, p: &Descriptor, x: Tensor, to: Tensor) -> Result<Descriptor, CudaError> {
        let op = Descriptor::new(&self.dnn, kind::OPERATION_POINTWISE)?;
        op.set_descriptors(attribute::OP_POINTWISE_DESCRIPTOR, &[p])?;
        op.set_descriptors(attribute::OP_POINTWISE_X, &[self.descriptor(x)])?;
        op.set_descriptors(attribute::OP_POINTWISE_Y, &[self.descriptor(to)])?;
        Ok(op)
    }

    fn descriptor(&self, tensor: Tensor) -> &Descriptor {
        &self.tensors[tensor.0].0
    }

    /// The extents of a tensor.
    pub(crate) fn dims(&self, tensor: Tensor) -> Dims {
        self.tensors[tensor.0].2
    }

    fn add(&mut self, needs: Vec<Descriptor>, op: Descriptor) -> Result<(), CudaError> {
        self.operations.push((needs, op.finalize()?));
        Ok(())
    }
}

/// `CUDNN_POINTWISE_GEN_INDEX`.
const GEN_INDEX: c_int = 501;
/// `CUDNN_POINTWISE_BINARY_SELECT`.
const BINARY_SELECT: c_int = 601;
/// The element types of operands of comparisons.
pub(crate) const INDEX_TYPE: c_int = DATA_INT32;
pub(crate) const BOOLEAN_TYPE: c_int = DATA_BOOLEAN;

/// The strides of a packed, row-major tensor.
pub(crate) const fn packed(dims: Dims) -> Dims {
    [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1]
}
