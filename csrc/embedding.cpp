#include "embedding.hpp"

#include "decoder_layer.hpp"

namespace triforce {

void Embedding::expect(Type type, int64_t vocabulary, int64_t hidden) const {
    if (table_) return table_->expect(type, vocabulary, hidden);
    require(matrix_->type() == type && matrix_->outputs() == vocabulary && matrix_->inputs() == hidden,
            "embedding must be of the model's shape and type");
}

void Embedding::rows(const int64_t* ids, int64_t count, float* x) const {
    if (!table_) matrix_->rows(ids, count, x);
    for (int64_t i = 0; table_ && i < count; i++) table_->row(ids[i], x + i * hidden());
    scale(x, count * hidden(), scale_);
}

}  // namespace triforce
