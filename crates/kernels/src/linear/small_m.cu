// small_m for weights in the activations' type: see small_m.cuh. Names: small_m[_norm][_gated | _logits]_T_tTOKENS_rRT.
#include "small_m.cuh"

#define PLAIN(T, tokens, rt) SMALL_M(small_m_##T##_t##tokens##_r##rt, T, T, T, tokens, rt, 0)
#define NORMED(T, tokens, rt) SMALL_M(small_m_norm_##T##_t##tokens##_r##rt, T, T, T, tokens, rt, NORM)
#define ALL(T, tokens)                                                                 \
    PLAIN(T, tokens, 2)                                                                \
    PLAIN(T, tokens, 3)                                                                \
    PLAIN(T, tokens, 4)                                                                \
    NORMED(T, tokens, 2)                                                               \
    NORMED(T, tokens, 3)                                                               \
    NORMED(T, tokens, 4)                                                               \
    SMALL_M(small_m_gated_##T##_t##tokens##_r4, T, T, T, tokens, 4, GATED)             \
    SMALL_M(small_m_norm_gated_##T##_t##tokens##_r4, T, T, T, tokens, 4, NORM | GATED) \
    SMALL_M(small_m_logits_##T##_t##tokens##_r4, T, T, float, tokens, 4, 0)            \
    SMALL_M(small_m_norm_logits_##T##_t##tokens##_r4, T, T, float, tokens, 4, NORM)
#define TYPE(T)                                                          \
    PLAIN(T, 8, 1)                                                       \
    SMALL_M(small_m_gated_##T##_t8_r2, T, T, T, 8, 2, GATED)             \
    ALL(T, 8)                                                            \
    ALL(T, 16)
TYPE(bf16)
TYPE(f16)
