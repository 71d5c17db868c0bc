"""The router's own cost, beside other routers, in front of engines that compute nothing."""
