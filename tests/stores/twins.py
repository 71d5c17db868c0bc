"""The policies as in their papers: with lists, without pins or optimisations."""


class LruTwin:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: list[int] = []

    def resident(self) -> set[int]:
        return set(self.keys)

    def ask(self, key: int) -> None:
        if key in self.keys:
            self.keys.remove(key)
        elif len(self.keys) == self.capacity:
            self.keys.pop(0)
        self.keys.append(key)


class ArcTwin:
    """Figure 4 of the paper; lists begin with the least recent."""

    def __init__(self, capacity: int) -> None:
        self.c = capacity
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def resident(self) -> set[int]:
        return {*self.t1, *self.t2}

    def ask(self, x: int) -> None:
        if x in self.t1 or x in self.t2:  # Case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:  # Case II
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            if len(self.resident()) == self.c:  # Always true in the paper; here keys may be discarded.
                self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # Case III
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            if len(self.resident()) == self.c:
                self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:  # Case IV
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    if len(self.resident()) == self.c:
                        self.replace(x)
                else:
                    self.t1.pop(0)
            elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) >= self.c:
                if len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * self.c:
                    self.b2.pop(0)
                if len(self.resident()) == self.c:
                    self.replace(x)
            self.t1.append(x)

    def replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))
