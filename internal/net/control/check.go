package control

import (
	"errors"
	"fmt"

	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// MaxItems bounds the elements of an array or map.
const MaxItems = 1 << 18

const maxDepth = 16 // containers in containers

// What follows the first byte of a value: so many bytes of content, or a length field of so many bytes.
var (
	plain = table(map[byte]int{
		msgpcode.Uint8: 1, msgpcode.Uint16: 2, msgpcode.Uint32: 4, msgpcode.Uint64: 8, msgpcode.Float: 4, msgpcode.Double: 8,
		msgpcode.Int8: 1, msgpcode.Int16: 2, msgpcode.Int32: 4, msgpcode.Int64: 8,
		msgpcode.FixExt1: 2, msgpcode.FixExt2: 3, msgpcode.FixExt4: 5, msgpcode.FixExt8: 9, msgpcode.FixExt16: 17,
	})
	sized = table(map[byte]int{
		msgpcode.Str8: 1, msgpcode.Str16: 2, msgpcode.Str32: 4, msgpcode.Bin8: 1, msgpcode.Bin16: 2, msgpcode.Bin32: 4,
		msgpcode.Ext8: 1, msgpcode.Ext16: 2, msgpcode.Ext32: 4, msgpcode.Array16: 2, msgpcode.Array32: 4, msgpcode.Map16: 2, msgpcode.Map32: 4,
	})
)

// table makes the map quick to look up.
func table(of map[byte]int) (all [256]int) {
	for c, n := range of {
		all[c] = n
	}
	return all
}

// check walks over msgpack and reports what a decoder must not be given: containers deeper than 15 or with more than MaxItems
// elements, lengths beyond the end, and anything but exactly one value. Afterwards the decoder's recursion and its allocations
// are bounded by the body's size.
func check(b []byte) error {
	var open [maxDepth]int // values still to come in each open container
	open[0] = 1
	depth := 0
	for {
		for open[depth] == 0 {
			if depth == 0 {
				if len(b) != 0 {
					return fmt.Errorf("%d bytes after the value", len(b))
				}
				return nil
			}
			depth--
		}
		open[depth]--

		if len(b) == 0 {
			return errors.New("cut short")
		}
		c := b[0]
		b = b[1:]
		var head, size, items int // bytes of the length field, of plain content, values inside
		switch {
		case msgpcode.IsFixedNum(c), c == msgpcode.Nil, c == msgpcode.False, c == msgpcode.True:
		case msgpcode.IsFixedString(c):
			size = int(c & msgpcode.FixedStrMask)
		case msgpcode.IsFixedArray(c):
			items = int(c & msgpcode.FixedArrayMask)
		case msgpcode.IsFixedMap(c):
			items = 2 * int(c&msgpcode.FixedMapMask)
		default:
			if size, head = plain[c], sized[c]; size+head == 0 {
				return fmt.Errorf("byte %#x does not begin a value", c)
			}
		}
		if head > 0 {
			if len(b) < head {
				return errors.New("cut short")
			}
			var length uint64
			for _, d := range b[:head] {
				length = length<<8 | uint64(d)
			}
			b = b[head:]
			if length > uint64(len(b)) {
				return errors.New("cut short")
			}
			n := int(length)
			switch c {
			case msgpcode.Array16, msgpcode.Array32:
				items = n
			case msgpcode.Map16, msgpcode.Map32:
				items = 2 * n
			case msgpcode.Ext8, msgpcode.Ext16, msgpcode.Ext32:
				size = n + 1
			default:
				size = n
			}
		}
		if size > len(b) || items > len(b) {
			return errors.New("cut short")
		}
		b = b[size:]
		if items > 0 {
			if items > 2*MaxItems {
				return fmt.Errorf("container of more than %d elements", MaxItems)
			}
			if depth++; depth == maxDepth {
				return fmt.Errorf("containers nested more than %d deep", maxDepth-1)
			}
			open[depth] = items
		}
	}
}
