#include "json_text.h"

#include <string.h>

unsigned rv_utf8_sequence(const uint8_t *p, size_t left)
{
    unsigned n = p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf5 ? 4 : 0;

    if (n == 0 || n > left)
        return 0;
    for (unsigned i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) || (p[0] == 0xf0 && p[1] < 0x90) ||
        (p[0] == 0xf4 && p[1] > 0x8f))
        return 0; /* overlong, a surrogate, or beyond U+10FFFF */
    return n;
}

/* Four hexadecimal digits; -1 = not. */
static int32_t hex4(const uint8_t *in, size_t left)
{
    int32_t value = 0;

    if (left < 4)
        return -1;
    for (unsigned i = 0; i < 4; i++) {
        uint8_t c = in[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;

        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

static unsigned put_code_point(char *out, uint32_t c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3f));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xe0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3f));
        out[2] = (char)(0x80 | (c & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3f));
    out[2] = (char)(0x80 | (c >> 6 & 0x3f));
    out[3] = (char)(0x80 | (c & 0x3f));
    return 4;
}

/* uXXXX, or two of them. */
static const char *unicode_escape(const uint8_t *in, size_t left, char *out, unsigned *ret_read, unsigned *ret_written)
{
    int32_t c = hex4(in + 1, left - 1), low;
    unsigned n = 5;

    if (c < 0)
        return "\\u needs four hexadecimal digits";
    if (c >= 0xdc00 && c <= 0xdfff)
        return "half a surrogate pair";
    if (c >= 0xd800 && c <= 0xdbff) {
        low = left >= 11 && in[5] == '\\' && in[6] == 'u' ? hex4(in + 7, left - 7) : -1;
        if (low < 0xdc00 || low > 0xdfff)
            return "half a surrogate pair";
        n = 11;
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    }
    *ret_read = n;
    *ret_written = put_code_point(out, (uint32_t)c);
    return NULL;
}

const char *rv_json_escape(const uint8_t *in, size_t left, char *out, unsigned *ret_read, unsigned *ret_written)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *found;

    if (left > 0 && in[0] == 'u')
        return unicode_escape(in, left, out, ret_read, ret_written);
    found = left > 0 && in[0] ? strchr(from, in[0]) : NULL;
    if (!found)
        return "an unknown escape in a text";
    out[0] = to[found - from];
    *ret_read = *ret_written = 1;
    return NULL;
}
