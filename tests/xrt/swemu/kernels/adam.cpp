// Adam over 512-bit words: load -> update -> store, streams between them.
//
//   params, mu, nu, gradient --> [load] ==lanes==> [update] ==lanes==> [store] --> in place
#include <cmath>
#include <queue>

#include "words.hpp"

namespace {

constexpr unsigned kLanes = 16;

struct Word {
  float lane[kLanes];
};

struct Element {
  Word params, mu, nu, gradient;
};

using Stream = std::queue<Element>;

void load(const Word* params, const Word* mu, const Word* nu, const Word* gradient,
          unsigned num_words, Stream& loaded) {
  for (unsigned i = 0; i < num_words; ++i)
    loaded.push({params[i], mu[i], nu[i], gradient[i]});
}

void update(Stream& loaded, Stream& updated, float rate, float correction1,
            float correction2) {
  constexpr float kBeta1 = 0.9f, kBeta2 = 0.999f, kEpsilon = 1e-8f;
  for (; !loaded.empty(); loaded.pop()) {
    Element element = loaded.front();
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      const float g = element.gradient.lane[lane];
      float& m = element.mu.lane[lane];
      float& v = element.nu.lane[lane];
      m = kBeta1 * m + (1 - kBeta1) * g;
      v = kBeta2 * v + (1 - kBeta2) * (g * g);
      const float root = std::sqrt(v * correction2) + kEpsilon;
      element.params.lane[lane] -= rate * (m * correction1 / root);
    }
    updated.push(element);
  }
}

void store(Stream& updated, Word* params, Word* mu, Word* nu) {
  for (unsigned i = 0; !updated.empty(); updated.pop(), ++i) {
    params[i] = updated.front().params;
    mu[i] = updated.front().mu;
    nu[i] = updated.front().nu;
  }
}

}  // namespace

extern "C" void adam(Word* params, Word* mu, Word* nu, const Word* gradient,
                     Scalar num_words, Scalar rate, Scalar correction1,
                     Scalar correction2) {
  Stream loaded, updated;
  load(params, mu, nu, gradient, num_words, loaded);
  update(loaded, updated, from_bits<float>(rate), from_bits<float>(correction1),
         from_bits<float>(correction2));
  store(updated, params, mu, nu);
}
