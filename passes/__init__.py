"""Graph passes. Each file is one pass, each pass one verb-named function that returns a `PassResult`."""

if __name__ != "dpquant_compile.passes":
    raise ImportError("import dpquant_compile.passes, not the bare folder `passes`")
