#include "write.hpp"

#include <algorithm>

#include "threads.hpp"

namespace triforce {

void run(const NewTokens& tokens) {
    constexpr int64_t at_once = 32;  // a few microseconds of work
    const WriteKernels& kernels = tokens.pages->is_bf16 ? write_bf16() : write_f32();
    parallel(static_cast<int>((tokens.count + at_once - 1) / at_once), [&](int64_t job) {
        kernels.write(tokens, job * at_once, std::min((job + 1) * at_once, tokens.count));
    });
}

}  // namespace triforce
