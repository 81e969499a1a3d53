// A few helpers for the check program: it looks for memory errors and races, and for results that depend on what they
// must not. What the right numbers are is the Python tests' matter.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace chairlift {

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                               \
        }                                                                               \
    } while (false)

// splitmix64 (Steele et al. 2014).
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t bits() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    }
    int below(int n) { return static_cast<int>(bits() % static_cast<uint64_t>(n)); }
    // In [-1, 1).
    float real() { return static_cast<float>(bits() >> 40) * 0x1p-23F - 1.0F; }
    // Exactly as long as asked for, on the heap, so that AddressSanitizer sees a read past the end.
    std::vector<float> reals(size_t n) {
        std::vector<float> values(n);
        for (float& value : values) value = real();
        return values;
    }

private:
    uint64_t state_;
};

void check_pool();
void check_matmul();
void check_sampling();
void check_rows();
void check_attention();
void check_program();

}  // namespace chairlift
