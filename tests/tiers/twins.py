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


class SlruTwin:
    """Lists begin with the next key to leave."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.protected_max = capacity // 4
        self.probation: list[int] = []
        self.protected: list[int] = []

    def resident(self) -> set[int]:
        return {*self.probation, *self.protected}

    def ask(self, x: int) -> None:
        if x not in self.resident():
            if len(self.resident()) == self.capacity:
                (self.probation or self.protected).pop(0)
            self.probation.append(x)
            return
        (self.probation if x in self.probation else self.protected).remove(x)
        self.protected.append(x)
        if len(self.protected) > self.protected_max:
            self.probation.append(self.protected.pop(0))


class S3FifoTwin:
    """Algorithm 1 of the paper; lists begin with the oldest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small_max = max(1, int(capacity * 0.1))
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.freq: dict[int, int] = {}

    def resident(self) -> set[int]:
        return {*self.small, *self.main}

    def ask(self, x: int) -> None:
        if x in self.resident():
            self.freq[x] = min(self.freq[x] + 1, 3)
            return
        if len(self.resident()) == self.capacity:
            self.evict()
        if x in self.ghosts:
            self.ghosts.remove(x)
            self.main.append(x)
        else:
            self.small.append(x)
        self.freq[x] = 0

    def evict(self) -> None:
        if len(self.small) >= self.small_max:
            while self.small:
                t = self.small.pop(0)
                if self.freq[t] > 1:
                    self.main.append(t)
                    self.freq[t] = 0
                else:
                    self.ghosts.append(t)
                    if len(self.ghosts) > max(1, self.capacity - self.small_max):
                        self.ghosts.pop(0)
                    return
        while self.main:
            t = self.main.pop(0)
            if self.freq[t] > 0:
                self.main.append(t)
                self.freq[t] -= 1
            else:
                return
        self.ghosts.append(self.small.pop(0))
