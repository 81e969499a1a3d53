// Each level's table of testing/peak.cpp.
#include "testing/peak.h"

#define CHAIRLIFT_DECLARE_PEAKS(level) \
    namespace chairlift::level {       \
    extern const PeakKernels peaks;    \
    }

CHAIRLIFT_DECLARE_PEAKS(portable)
#ifdef CHAIRLIFT_X86
CHAIRLIFT_DECLARE_PEAKS(avx2)
CHAIRLIFT_DECLARE_PEAKS(avx2_vnni)
CHAIRLIFT_DECLARE_PEAKS(avx512)
CHAIRLIFT_DECLARE_PEAKS(avx512_bf16)
#endif

namespace chairlift {

const PeakKernels& peak_kernels(Isa isa) {
    kernels(isa);  // throws for a level that is not available
#ifdef CHAIRLIFT_X86
    if (isa == Isa::avx2) return avx2::peaks;
    if (isa == Isa::avx2_vnni) return avx2_vnni::peaks;
    if (isa == Isa::avx512) return avx512::peaks;
    if (isa == Isa::avx512_bf16) return avx512_bf16::peaks;
#endif
    return portable::peaks;
}

}  // namespace chairlift
