// One bug of each kind that scripts/sanitize.sh looks for, to be loaded into Python as the kernels are: if the sanitizers
// do not find these, their silence about the kernels means nothing.
#include <climits>
#include <thread>
#include <vector>

namespace {

volatile int four = 4, wide = 40, largest = INT_MAX;  // which the compiler may not reason about
int shared = 0;

}  // namespace

extern "C" {

int nothing() { return std::vector<int>(four)[3]; }

int out_of_bounds() {
    const std::vector<int> values(four);
    return values.data()[four];
}

int use_after_free() {
    const int* freed = std::vector<int>(four).data();
    return freed[0];
}

int leak() { return *new int(four); }

int too_wide_a_shift() { return 1 << wide; }

int overflow() { return largest + 1; }

int race() {
    std::thread other([] { shared++; });
    shared++;
    other.join();
    return shared;
}

}  // extern "C"
