package slurm

import (
	"slices"
	"strings"
	"testing"
)

func TestNodes(t *testing.T) {
	for list, want := range map[string]string{
		"m1":                      "m1",
		"m[1-3]":                  "m1 m2 m3",
		"m[1-2,5],login":          "m1 m2 m5 login",
		"n[008-011]":              "n008 n009 n010 n011",
		"n[9-11]":                 "n9 n10 n11",
		"r[1-2]n[01-02]":          "r1n01 r1n02 r2n01 r2n02",
		"r[1,3]-s[0-1]x,z[7]":     "r1-s0x r1-s1x r3-s0x r3-s1x z7",
		"a-b.example,c[1-2].d":    "a-b.example c1.d c2.d",
		"n[00-00]":                "n00",
		"n[098-101],n[1-1,03-03]": "n098 n099 n100 n101 n1 n03",
	} {
		got, err := Nodes(list)
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %v, %v", list, got, err)
		}
	}
	for _, list := range []string{
		"", ",", "a,", ",a", "a,,b", "m[1-3", "m1-3]", "m[]", "m[3-1]", "m[a-b]", "m[1-]", "m[-1]", "m[[1]]", "m[1,]", "m[+1]", "a b", "n\n",
		"m[0-99999999999999999]", "m[1-60000][1-60000]", "m[0-65536]", "m[1-40000],n[1-40000]", "m[18446744073709551615]", strings.Repeat("x", 300),
	} {
		if got, err := Nodes(list); err == nil {
			t.Errorf("%.40q: %d names", list, len(got))
		}
	}
}

func FuzzNodes(f *testing.F) {
	for _, list := range []string{"m[1-3]", "r[1-2]n[01-02],x", "n[008-011]", "[1]", "a[0-9][0-9][0-9][0-9][0-9]"} {
		f.Add(list)
	}
	f.Fuzz(func(t *testing.T, list string) {
		all, err := Nodes(list)
		if err != nil {
			return
		}
		if len(all) == 0 || len(all) > MaxNodes || slices.ContainsFunc(all, func(n string) bool { return n == "" || strings.ContainsAny(n, "[], ") }) {
			t.Fatalf("%q: %.100q", list, all)
		}
		again, err := Nodes(strings.Join(all, ","))
		if err != nil || !slices.Equal(again, all) {
			t.Fatalf("%q: %v", list, err)
		}
	})
}
