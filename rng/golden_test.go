package rng

import (
	"math"
	"slices"
	"testing"
)

// The values in this file are frozen. Never change them: every checkpoint, published hash and repeated run depends on them. A
// change that makes one of these tests fail is wrong, whatever else it improves; new kinds of draws get new tests.
//
// They are compared as bits, and hold on every processor and at every GOAMD64 level.

func TestGoldenStreams(t *testing.T) {
	for _, c := range []struct {
		seed    uint64
		place   Place
		words   []uint32
		longs   []uint64
		floats  []uint32 // bits
		doubles []uint64 // bits
		normals []uint64 // bits
		ints    []int    // below 1000
	}{
		{
			seed:    0x0,
			place:   Place{Step: 0x0, Sample: 0x0, Layer: 0x0, Op: 0x0},
			words:   []uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8, 0xf8e4cca4, 0x5cb200db},
			longs:   []uint64{0xe169c58d6627e8d5, 0x9b00dbd8bc57ac4c, 0x5cb200dbf8e4cca4},
			floats:  []uint32{0x3ecc4fd0, 0x3f6169c5, 0x3f3c57ac, 0x3f1b00db},
			doubles: []uint64{0x3fec2d38b1acc4fd, 0x3fe3601b7b178af5, 0x3fd72c8036fe3932},
			normals: []uint64{0xbff9ffd9aa3bc9b5, 0x3fed85c966f9a5f4, 0xbfbe97e1a57636cc, 0xbfedb2282deb1519, 0x3ff55696e96ec85f, 0xbfc2aead0286b0b4},
			ints:    []int{880, 605, 362, 37, 319, 271, 415, 426, 693, 916, 27, 355},
		},
		{
			seed:    0x1,
			place:   Place{Step: 0x1, Sample: 0x0, Layer: 0x0, Op: 0x0},
			words:   []uint32{0x127bee41, 0x1e047488, 0x48842b20, 0x0a393496, 0x10cc6764, 0xa9634a04},
			longs:   []uint64{0x1e047488127bee41, 0x0a39349648842b20, 0xa9634a0410cc6764},
			floats:  []uint32{0x3d93df70, 0x3df023a0, 0x3e910856, 0x3d239340},
			doubles: []uint64{0x3fbe047488127be8, 0x3fa472692c910850, 0x3fe52c694082198c},
			normals: []uint64{0x3fdef68cb4769d73, 0x3ff60d8e531e2787, 0x3fe7659e3fadd912, 0x3fb5f1d133e4cbb1, 0xbf7f5fa9da033ef8, 0xbfdd84015900370d},
			ints:    []int{117, 39, 661, 942, 589, 157, 3, 978, 13, 257, 522, 311},
		},
		{
			seed:    0x123456789abcdef,
			place:   Place{Step: 0xc8, Sample: 0x1f, Layer: 0xc, Op: 0x3},
			words:   []uint32{0x5a4f9d36, 0x85d4a411, 0x0bb09896, 0x5a00a6ac, 0x0053c1e8, 0x3e6db1cc},
			longs:   []uint64{0x85d4a4115a4f9d36, 0x5a00a6ac0bb09896, 0x3e6db1cc0053c1e8},
			floats:  []uint32{0x3eb49f3a, 0x3f05d4a4, 0x3d3b0980, 0x3eb4014c},
			doubles: []uint64{0x3fe0ba94822b49f3, 0x3fd68029ab02ec26, 0x3fcf36d8e60029e0},
			normals: []uint64{0xbfe7304fb2d57a39, 0x3fe74df66979950f, 0x3fd1ecf257ff1967, 0xbfdcae892da157f1, 0x3ff348e11663e7f9, 0x3ff7ef097789bca2},
			ints:    []int{522, 351, 243, 36, 56, 97, 388, 675, 755, 122, 679, 979},
		},
		{
			seed:    0xffffffffffffffff,
			place:   Place{Step: 0xfffffffe, Sample: 0xffffffff, Layer: 0xfff, Op: 0xfffff},
			words:   []uint32{0x72e19838, 0xb8407081, 0xd9e83627, 0x8f3f80e1, 0x897e9103, 0x28665325},
			longs:   []uint64{0xb840708172e19838, 0x8f3f80e1d9e83627, 0x28665325897e9103},
			floats:  []uint32{0x3ee5c330, 0x3f384070, 0x3f59e836, 0x3f0f3f80},
			doubles: []uint64{0x3fe7080e102e5c33, 0x3fe1e7f01c3b3d06, 0x3fc4332992c4bf48},
			normals: []uint64{0xbff7c0edaa8c0fbe, 0xbfe090c4f1a9c8ea, 0x3fe352128d4d4500, 0x3ffceb7531f35796, 0x3ffeb9c9acce8b35, 0xbfee1df5020170a5},
			ints:    []int{719, 559, 157, 577, 332, 867, 839, 52, 945, 103, 627, 633},
		},
	} {
		stream := New(c.seed, c.place)
		golden(t, "Uint32", stream, c.words, (*Stream).Uint32)
		golden(t, "Uint64", stream, c.longs, (*Stream).Uint64)
		golden(t, "Float32", stream, c.floats, func(s *Stream) uint32 { return math.Float32bits(s.Float32()) })
		golden(t, "Float64", stream, c.doubles, func(s *Stream) uint64 { return math.Float64bits(s.Float64()) })
		golden(t, "Normal", stream, c.normals, func(s *Stream) uint64 { return math.Float64bits(s.Normal()) })
		golden(t, "IntN(1000)", stream, c.ints, func(s *Stream) int { return s.IntN(1000) })
	}
}

// golden compares the first draws of a stream.
func golden[T comparable](t *testing.T, name string, s Stream, want []T, draw func(*Stream) T) {
	t.Helper()
	got := make([]T, len(want))
	for i := range got {
		got[i] = draw(&s)
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s of %x under %x = %#v, want %#v", name, s.Counter(), s.Key(), got, want)
	}
}

// Many normals, folded into one number: rare arguments of the series count too.
func TestGoldenNormals(t *testing.T) {
	s := New(2024, Place{Op: 7})
	sum := uint64(14695981039346656037) // FNV-1a, a word at a time
	for range 100000 {
		sum = (sum ^ math.Float64bits(s.Normal())) * 1099511628211
	}
	if want := uint64(0x9164cf518ec2facc); sum != want {
		t.Errorf("hash of 100000 normals = %#x, want %#x", sum, want)
	}
}

func TestGoldenPerms(t *testing.T) {
	for _, c := range []struct {
		seed, epoch, n uint64
		first          []uint64
	}{
		{0x0, 0x0, 0x1, []uint64{0}},
		{0x1, 0x0, 0x2, []uint64{1, 0}},
		{0x1, 0x0, 0x3, []uint64{1, 2, 0}},
		{0x1, 0x0, 0xa, []uint64{2, 5, 3, 4, 0, 8, 7, 9, 6, 1}},
		{0x1, 0x1, 0xa, []uint64{9, 5, 0, 4, 6, 3, 1, 8, 2, 7}},
		{0x7, 0x3, 0x10, []uint64{8, 11, 0, 4, 15, 12, 7, 6, 14, 2, 3, 9, 13, 10, 5, 1}},
		{0x123456789abcdef, 0x10000000000, 0xf4243, []uint64{85042, 502138, 708503, 239662, 83717, 49715}},
		{0x7, 0x3, 0x10000000000, []uint64{862655632350, 57763495391, 622388104469, 265534279138, 623525673972, 609343414960}},
		{0x7, 0x0, 0xffffffffffffffff, []uint64{1891220993168782117, 18350134891495936798, 14705682374583631603, 10036309882752994193, 18413670055844661422, 4198999004018169467}},
	} {
		p := NewPerm(c.seed, c.epoch, c.n)
		got := make([]uint64, len(c.first))
		for i := range got {
			got[i] = p.At(uint64(i))
		}
		if !slices.Equal(got, c.first) {
			t.Errorf("NewPerm(%#x, %#x, %#x) begins with %d, want %d", c.seed, c.epoch, c.n, got, c.first)
		}
	}
}

func TestGoldenSampleStreams(t *testing.T) {
	for _, c := range []struct {
		seed, epoch, sample uint64
		words               []uint32
	}{
		{0, 0, 0, []uint32{0xf119ebe8, 0xf41ab6cd, 0x34edcba, 0x5e62ad4d, 0x4eae9762}},
		{1, 0, 7, []uint32{0x77fb738, 0x9f00ca20, 0xb00039d2, 0xf8f8b6bb, 0x29cbb6f5}},
		{1, 1, 7, []uint32{0x868bb415, 0xa211fb71, 0xde0aa8ca, 0x726ad881, 0x1b897184}},
		{0x123456789abcdef, 1 << 40, 1 << 35, []uint32{0x5d8a44a, 0x3237c5d, 0xaf22ddd9, 0xce18ccd8, 0x3ddd615b}},
	} {
		s := ForSample(c.seed, c.epoch, c.sample)
		var got []uint32
		for range c.words {
			got = append(got, s.Uint32())
		}
		if !slices.Equal(got, c.words) {
			t.Errorf("sample %d of epoch %d under seed %#x: %#x", c.sample, c.epoch, c.seed, got)
		}
	}
}
