// Tensor arguments of the bindings: borrowed views, checked before anything reads them.
#pragma once

#include <cstdint>
#include <initializer_list>

#include <nanobind/nanobind.h>

#include "types.hpp"

namespace triforce {

/// A contiguous tensor in CPU memory, not owned: valid while the caller of the binding holds its argument.
struct Tensor {
    const char* name;
    void* data;
    Type type;
    int dims;
    int64_t shape[8];

    int64_t operator[](int dim) const { return shape[dim]; }

    /// Any dimension matches -1. Throws nb::value_error that names the tensor, what it should be and what it is.
    void expect(Type type, std::initializer_list<int64_t> shape) const;

    /// The data, after `expect`.
    template <class T>
    T* as(std::initializer_list<int64_t> wanted) const {
        expect(type_of<T>, wanted);
        return static_cast<T*>(data);
    }
};

/// Throws nb::value_error unless `object` is a contiguous CPU tensor or array (torch, numpy, or anything that speaks
/// DLPack and outlives the call).
Tensor tensor(const char* name, nanobind::handle object);

/// Throws nb::value_error.
void check(bool fine, const char* why);

}  // namespace triforce
