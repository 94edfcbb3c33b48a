// What turns tokens into the start of the residual stream.
#pragma once

#include <memory>
#include <optional>

#include "matrix.hpp"

namespace triforce {

/// Rows of a table (V, C), which is borrowed, or of a packed matrix, times a factor.
class Embedding {
  public:
    Embedding(const WeightSource& table, float scale) : table_(table), scale_(scale) {}
    Embedding(std::shared_ptr<Matrix> matrix, float scale) : matrix_(std::move(matrix)), scale_(scale) {}

    int64_t vocabulary() const { return table_ ? table_->outputs() : matrix_->outputs(); }
    int64_t hidden() const { return table_ ? table_->inputs() : matrix_->inputs(); }
    /// Throws std::invalid_argument unless it is of this shape, for products of this type.
    void expect(Type type, int64_t vocabulary, int64_t hidden) const;
    /// Writes the rows of tokens, (count, C).
    void rows(const int64_t* ids, int64_t count, float* x) const;

  private:
    std::optional<WeightSource> table_;
    std::shared_ptr<Matrix> matrix_;
    float scale_;
};

}  // namespace triforce
