// Tensors that belong to callers: borrowed views, checked before anything reads them.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "types.hpp"

namespace triforce {

/// A contiguous tensor in CPU memory, borrowed: valid while the caller of the binding holds its argument.
struct Tensor {
    const char* name;
    void* data;
    Type type;
    int dims;
    int64_t shape[8];

    int64_t operator[](int dim) const { return shape[dim]; }
    /// Bytes of a row of a matrix of numbers or of bytes.
    int64_t row_bytes() const { return shape[1] * (type == Type::u8 ? 1 : size_of(type)); }

    /// Throws std::invalid_argument unless type and shape fit. -1: any size. The error names the expected and the actual type
    /// and shape.
    void expect(Type type, std::initializer_list<int64_t> shape) const;

    /// The data, after `expect`.
    void* as(Type wanted_type, std::initializer_list<int64_t> wanted) const {
        expect(wanted_type, wanted);
        return data;
    }
    template <class T>
    T* as(std::initializer_list<int64_t> wanted) const {
        return static_cast<T*>(as(type_of(T{}), wanted));
    }
};

}  // namespace triforce
