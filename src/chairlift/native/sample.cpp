#include "sample.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "half.h"

namespace chairlift {

namespace {

// A row as the kernels see it.
struct Row {
    const SampleKernels& kernels;
    const float* values;
    int64_t size;
};

// One token in a ranking: by value, equal values by lower id.
struct Ranked {
    float value;
    int32_t id;

    bool before(const Ranked& other) const { return value > other.value || (value == other.value && id < other.id); }
};

// Tokens in descending order of exp((x - max) / temperature) without sorting them: they are counted and weighed in bins,
// and a bin in which something is decided is halved until few are left.
class Ranking {
public:
    // `weights`: room for row.size floats.
    Ranking(const Row& row, float max, float temperature, float* weights)
        : row_(row), max_(max), temperature_(temperature), weights_(weights), counts_(kBins), masses_(kBins) {
        row.kernels.sum_exp(row.values, row.size, max, temperature, weights);
        for (int64_t i = 0; i < row.size; ++i) {
            const int bin = bin_of(weights[i]);
            ++counts_[bin];
            masses_[bin] += static_cast<double>(weights[i]);
        }
    }

    // How many tokens weigh at least `weight`, the largest weight being 1.
    int64_t count_at_least(float weight) {
        if (weight <= 0.0F) return row_.size;
        const int last = bin_of(std::min(weight, 1.0F));
        int64_t count = 0;
        for (int bin = 0; bin < last; ++bin) count += counts_[bin];
        const std::vector<Ranked>& edge = members(last);
        return count + std::count_if(edge.begin(), edge.end(), [&](const Ranked& r) { return weights_[r.id] >= weight; });
    }

    // Total weight of the first `count` tokens.
    double mass_of(int64_t count) {
        double mass = 0.0;
        for (int bin = 0; bin < kBins; ++bin) {
            if (count < counts_[bin]) {
                std::vector<Ranked>& edge = members(bin);
                std::nth_element(edge.begin(), edge.begin() + count, edge.end(), is_before);
                return mass + mass_between(edge.begin(), edge.begin() + count);
            }
            count -= counts_[bin];
            mass += masses_[bin];
        }
        return mass;
    }

    // Where a running sum of weights in descending order arrives.
    struct Place {
        int64_t rank;  // of the token that takes the sum there
        int32_t id;
        double mass;  // of the tokens up to and including it
    };

    // The first of the first `count` tokens at which the running sum reaches `target`, or exceeds it if `beyond`;
    // the last of them if rounding lets none.
    Place reach(double target, int64_t count, bool beyond) {
        const auto reached = [&](double mass) { return beyond ? mass > target : mass >= target; };
        double mass = 0.0;
        int64_t rank = 0;
        int bin = 0;
        while (rank + counts_[bin] < count && !reached(mass + masses_[bin])) {
            rank += counts_[bin];
            mass += masses_[bin];
            ++bin;
        }
        std::vector<Ranked>& edge = members(bin);
        auto begin = edge.begin();
        auto end = edge.end();
        while (end - begin > kFew) {
            const auto middle = begin + (end - begin) / 2;
            std::nth_element(begin, middle, end, is_before);
            const double half = mass_between(begin, middle);
            if (rank + (middle - begin) >= count || reached(mass + half)) {
                end = middle;
            } else {
                rank += middle - begin;
                mass += half;
                begin = middle;
            }
        }
        std::sort(begin, end, is_before);
        for (; begin != end; ++begin) {
            mass += static_cast<double>(weights_[begin->id]);
            ++rank;
            if (reached(mass) || rank == count) return {rank - 1, begin->id, mass};
        }
        // The mass, summed in another order, promised more than the tokens hold: it ends at the last of them.
        return {rank - 1, (end - 1)->id, mass};
    }

private:
    // 32 bins for each halving of the weight, and one for what is below the least of them.
    static constexpr int kShift = 18;
    static constexpr uint32_t kOneBits = 0x3f800000;
    static constexpr int kBins = (kOneBits >> kShift) + 1;
    static constexpr int kFew = 32;          // tokens that are quicker sorted than halved
    static constexpr int64_t kScanGain = 8;  // vector lanes a token that the scan must skip to be worth it

    using Members = std::vector<Ranked>::const_iterator;

    static int bin_of(float weight) { return static_cast<int>((kOneBits - float_to_bits(weight)) >> kShift); }

    static bool is_before(const Ranked& a, const Ranked& b) { return a.before(b); }

    double mass_between(Members begin, Members end) const {
        double mass = 0.0;
        for (; begin != end; ++begin) mass += static_cast<double>(weights_[begin->id]);
        return mass;
    }

    // The tokens of one bin, in no order; valid until the next call. The caller may reorder them.
    std::vector<Ranked>& members(int bin) {
        if (bin == bin_of_members_) return members_;
        members_.clear();
        bin_of_members_ = bin;
        // The least weight in the bin; the last one reaches down to 0.
        const uint32_t span = (static_cast<uint32_t>(bin) << kShift) + ((1U << kShift) - 1U);
        const float least = span >= kOneBits ? 0.0F : bits_to_float(kOneBits - span);
        const auto add_if_member = [&](int64_t i) {
            if (bin_of(weights_[i]) != bin) return;
            members_.push_back({(row_.values[i] - max_) / temperature_, static_cast<int32_t>(i)});
        };
        int64_t num_found = 0;
        for (int i = 0; i <= bin; ++i) num_found += counts_[i];
        if (num_found * kScanGain > row_.size) {
            for (int64_t i = 0; i < row_.size; ++i) add_if_member(i);
            return members_;
        }
        int64_t i = -1;
        while ((i = row_.kernels.find(weights_, i + 1, row_.size, least)) < row_.size) add_if_member(i);
        return members_;
    }

    Row row_;
    float max_;
    float temperature_;
    float* weights_;
    std::vector<int64_t> counts_;
    std::vector<double> masses_;
    std::vector<Ranked> members_;
    int bin_of_members_ = -1;
};

// Bias, then penalties: repetition divides a positive logit and multiplies a negative one, presence and frequency are
// subtracted for tokens in the output. False when one of them made a NaN, which has no place in a ranking.
bool adjust(const SampleParams& params, const Adjustments& changes, float* logits) {
    bool has_nan = false;
    for (int i = 0; i < changes.num_bias; ++i) {
        float& logit = logits[changes.bias_ids[i]];
        logit += changes.bias_values[i];
        has_nan |= std::isnan(logit);
    }
    for (int i = 0; i < changes.num_seen; ++i) {
        float& logit = logits[changes.seen_ids[i]];
        logit = logit > 0.0F ? logit / params.repetition_penalty : logit * params.repetition_penalty;
        const int32_t count = changes.seen_counts[i];
        if (count > 0) logit -= params.presence_penalty + params.frequency_penalty * static_cast<float>(count);
        has_nan |= std::isnan(logit);
    }
    return !has_nan;
}

int32_t draw(Ranking& ranking, int64_t vocab, const SampleParams& params) {
    int64_t keep = params.min_p > 0.0F ? ranking.count_at_least(params.min_p) : vocab;
    if (params.top_k > 0) keep = std::min<int64_t>(keep, params.top_k);
    keep = std::max<int64_t>(keep, 1);
    double mass = ranking.mass_of(keep);
    if (params.top_p < 1.0F) {
        const Ranking::Place last = ranking.reach(static_cast<double>(params.top_p) * mass, keep, false);
        keep = last.rank + 1;
        mass = last.mass;
    }
    const double random = static_cast<double>(uniform(params.seed, params.choice, params.index));
    return ranking.reach(random * mass, keep, true).id;
}

// The token for adjusted logits whose largest is finite. `weights`: room for row.size floats.
int32_t choose(const Row& row, float max, const SampleParams& params, float* weights) {
    if (params.temperature == 0.0F) return static_cast<int32_t>(row.kernels.find(row.values, 0, row.size, max));
    Ranking ranking(row, max, params.temperature, weights);
    return draw(ranking, row.size, params);
}

// The `count` largest, in order.
std::vector<Ranked> largest(const Row& row, int64_t count) {
    std::vector<Ranked> top;
    count = std::min(count, row.size);
    top.reserve(static_cast<size_t>(count) + 1);
    float threshold = -INFINITY;
    for (int64_t i = 0; count > 0 && (i = row.kernels.find(row.values, i, row.size, threshold)) < row.size; ++i) {
        const Ranked token{row.values[i], static_cast<int32_t>(i)};
        if (static_cast<int64_t>(top.size()) == count && !token.before(top.back())) continue;
        const auto place = std::find_if(top.begin(), top.end(), [&](const Ranked& r) { return token.before(r); });
        top.insert(place, token);
        if (static_cast<int64_t>(top.size()) > count) top.pop_back();
        if (static_cast<int64_t>(top.size()) == count) threshold = top.back().value;
    }
    return top;
}

void report(const Row& row, float max, const SampleParams& params, SampleResult& result) {
    const double total = row.kernels.sum_exp(row.values, row.size, max, 1.0F, nullptr);
    const double log_total = std::log(total);
    const auto logprob = [&](int32_t id) {
        return static_cast<float>(static_cast<double>(row.values[id]) - static_cast<double>(max) - log_total);
    };
    result.logprob = logprob(result.token);
    const std::vector<Ranked> top = largest(row, std::clamp(params.num_top, 0, kMaxTop));
    for (size_t i = 0; i < top.size(); ++i) {
        result.top_ids[i] = top[i].id;
        result.top_logprobs[i] = logprob(top[i].id);
    }
}

}  // namespace

SampleResult reduce_logits(const SampleKernels& kernels, const float* logits, int64_t vocab, const SampleParams& params,
                           const Adjustments& adjustments, float* scratch) {
    SampleResult result{std::max(params.target, 0), 0.0F, {}, {}, true};
    std::fill(std::begin(result.top_ids), std::end(result.top_ids), -1);
    const Row raw{kernels, logits, vocab};
    const float max = kernels.max(logits, vocab, &result.finite);
    if (!result.finite) return result;
    if (params.target < 0) {
        Row adjusted = raw;
        float adjusted_max = max;
        if (adjustments.num_bias > 0 || adjustments.num_seen > 0) {
            std::copy(logits, logits + vocab, scratch);
            result.finite = adjust(params, adjustments, scratch);
            adjusted.values = scratch;
            bool all_finite = true;  // bans are not
            adjusted_max = kernels.max(scratch, vocab, &all_finite);
        }
        result.finite = result.finite && std::isfinite(adjusted_max);
        if (!result.finite) return result;
        result.token = choose(adjusted, adjusted_max, params, scratch + vocab);
    }
    if (params.target >= 0 || params.num_top >= 0) report(raw, max, params, result);
    return result;
}

float uniform(uint64_t seed, uint32_t choice, uint32_t index) {
    uint32_t x[4] = {index, choice, 0, 0};
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * x[0];
        const uint64_t b = uint64_t{0xCD9E8D57} * x[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ key[0], static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ x[3] ^ key[1], static_cast<uint32_t>(a)};
        std::copy(next, next + 4, x);
        key[0] += 0x9E3779B9;  // golden ratio and sqrt(3) - 1, in 32 bits
        key[1] += 0xBB67AE85;
    }
    return static_cast<float>(x[0] >> 8) * 0x1p-24F;
}

}  // namespace chairlift
