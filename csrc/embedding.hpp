// The embedding: rows for tokens, with which the residual stream begins.
#pragma once

#include <memory>
#include <optional>

#include "matrix.hpp"

namespace triforce {

/// Rows of a borrowed table (V, C), or of a packed matrix, times `scale`.
class Embedding {
  public:
    Embedding(const WeightSource& table, float scale) : table_(table), scale_(scale) {}
    Embedding(std::shared_ptr<Matrix> matrix, float scale) : matrix_(std::move(matrix)), scale_(scale) {}

    int64_t vocabulary() const { return table_ ? table_->outputs() : matrix_->outputs(); }
    int64_t hidden() const { return table_ ? table_->inputs() : matrix_->inputs(); }
    /// Throws std::invalid_argument unless the embedding is (vocabulary, hidden) and its model's products take `type`.
    void expect(Type type, int64_t vocabulary, int64_t hidden) const;
    /// Writes the rows of tokens `ids` to x (count, C).
    void rows(const int64_t* ids, int64_t count, float* x) const;

  private:
    std::optional<WeightSource> table_;
    std::shared_ptr<Matrix> matrix_;
    float scale_;
};

}  // namespace triforce
