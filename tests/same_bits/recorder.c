/* A replacement for libnvrtc.so.13 that records compiles instead of compiling. Each compile becomes a file in the
   folder that SAME_BITS_RECORD names. The file holds strings, each ended by a zero byte: the source's name, the
   source, the options. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *name, *source;
} Program;

static char *copy(const char *text) {
    text = text ? text : "";
    size_t bytes = strlen(text) + 1;
    char *result = malloc(bytes);
    return result ? memcpy(result, text, bytes) : NULL;
}

int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return 0;
}

const char *nvrtcGetErrorString(int status) {
    return status ? "cannot write the record" : "success";
}

int nvrtcCreateProgram(Program **program, const char *source, const char *name, int header_count, const char *const *headers,
                       const char *const *header_names) {
    (void)headers, (void)header_names;
    if (header_count != 0) return 1; /* xtrain passes whole sources. */
    *program = malloc(sizeof **program);
    if (!*program) return 1;
    **program = (Program){copy(name), copy(source)};
    return 0;
}

int nvrtcDestroyProgram(Program **program) {
    free((*program)->name);
    free((*program)->source);
    free(*program);
    *program = NULL;
    return 0;
}

int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    const char *folder = getenv("SAME_BITS_RECORD");
    char path[4096];
    if (!folder || snprintf(path, sizeof path, "%s/XXXXXX", folder) >= (int)sizeof path) return 1;
    int descriptor = mkstemp(path);
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "wb");
    if (!file) return 1;
    fwrite(program->name, 1, strlen(program->name) + 1, file);
    fwrite(program->source, 1, strlen(program->source) + 1, file);
    for (int n = 0; n < count; n++) fwrite(options[n], 1, strlen(options[n]) + 1, file);
    int failed = ferror(file);
    return fclose(file) || failed;
}

int nvrtcGetProgramLogSize(Program *program, size_t *bytes) {
    (void)program;
    *bytes = 1;
    return 0;
}

int nvrtcGetProgramLog(Program *program, char *log) {
    (void)program;
    *log = 0;
    return 0;
}

int nvrtcGetCUBINSize(Program *program, size_t *bytes) {
    (void)program;
    *bytes = 0;
    return 0;
}

int nvrtcGetCUBIN(Program *program, char *cubin) {
    (void)program, (void)cubin;
    return 0;
}
