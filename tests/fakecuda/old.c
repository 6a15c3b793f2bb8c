/* <build>/fakecuda/old/libcuda.so.1: a driver of the years before 12.0, which lacks cuGetProcAddress_v2. */
__attribute__((visibility("default"))) int cuInit(unsigned flags);
__attribute__((visibility("default"))) int cuDriverGetVersion(int *version);

int cuInit(unsigned flags)
{
    return flags == 0 ? 0 : 1;
}

int cuDriverGetVersion(int *version)
{
    *version = 11080;
    return 0;
}
