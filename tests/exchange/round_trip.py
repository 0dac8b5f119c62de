def check(xtrain, work):
    return []
