package lab

import "testing"

func TestParseStat(t *testing.T) {
	const numbers = " 4 4 0 -1 4194560 100 0 0 0 7 5 3 2 20 0 1 0 900 1 1"
	for _, c := range []struct {
		text   string
		want   process
		ticks  int
		counts bool
	}{
		{"42 (a) b (c)) S 1" + numbers, process{42, 900}, 17, true},
		{"42 (x) Z 1" + numbers, process{}, 0, false},
		{"42 (kworker) S 2" + numbers, process{}, 0, false},
		{"2 (kthreadd) S 0" + numbers, process{}, 0, false},
		{"42 (x) S 1 4", process{}, 0, false},
		{"", process{}, 0, false},
	} {
		if p, ticks, counts := parseStat(c.text); p != c.want || ticks != c.ticks || counts != c.counts {
			t.Errorf("%q: %v %d %v", c.text, p, ticks, counts)
		}
	}
	if n := stolen("cpu  1 2 3 4 5 6 7 88 9 10\ncpu0 1\n"); n != 88 {
		t.Errorf("stolen is %d", n)
	}
}

// A watch says a share, or that it cannot.
func TestWatch(t *testing.T) {
	if share := NewWatch().Share(); share > 1 || share < 0 && share != -1 {
		t.Errorf("others used %g of the processors", share)
	}
}
