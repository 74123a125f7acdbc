/* roof: what a device can do at best, to stand beside every figure of the same run. Asked through the backend's table alone:
 * matrices far larger than any cache, copies inside the device, one large product, copies over the link. */
#pragma once

struct rig;

struct roof {
    double read;     /* bytes of device memory per second */
    double matrix;   /* operations of bf16 products per second */
    double up, down; /* bytes per second of pinned memory to the device, and back */
};

/* Measures, and writes a line for each way in which it did. What it could not measure is 0. 0, or negative errno. */
int roof_measure(struct rig *rig);
/* What this kind of device was found to do by programs written for nothing else; 0: nothing is known. */
struct roof roof_documented(const char *backend_name);
