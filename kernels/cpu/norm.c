/* norm: RMS norm of one row. */
#include "cpu.h"

enum { LANES = 16 };

void cpu_rms_norm(const struct device *device, const float *x, const float *w, int n, float eps, float *out) {
    int n_whole = n - n % LANES;

    if (device->numeric == NUMERIC_FAST) {
        float lane[LANES] = {0}; /* lane i sums x[i], x[i + 16], ...: one fixed order that vectorises */
        double sum = 0;
        float scale;

        for (int i = 0; i < n_whole; i += LANES)
            for (int j = 0; j < LANES; j++)
                lane[j] += x[i + j] * x[i + j];
        for (int j = 0; j < n - n_whole; j++)
            lane[j] += x[n_whole + j] * x[n_whole + j];
        for (int j = 0; j < LANES; j++)
            sum += (double)lane[j];
        scale = (float)(1.0 / sqrt(sum / n + (double)eps));
        for (int i = 0; i < n; i++)
            out[i] = x[i] * scale * w[i];
    } else {
        double sum = 0, scale;

        for (int i = 0; i < n; i++)
            sum += (double)x[i] * (double)x[i];
        scale = 1.0 / sqrt(sum / n + (double)eps);
        for (int i = 0; i < n; i++)
            out[i] = (float)((double)x[i] * scale * (double)w[i]);
    }
}
