package control

import (
	"errors"
	"fmt"

	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// MaxItems bounds the elements of an array or map.
const MaxItems = 1 << 18

const maxDepth = 16 // containers in containers

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
			switch c {
			case msgpcode.Uint8, msgpcode.Int8:
				size = 1
			case msgpcode.Uint16, msgpcode.Int16, msgpcode.FixExt1:
				size = 2
			case msgpcode.FixExt2:
				size = 3
			case msgpcode.Uint32, msgpcode.Int32, msgpcode.Float:
				size = 4
			case msgpcode.FixExt4:
				size = 5
			case msgpcode.Uint64, msgpcode.Int64, msgpcode.Double:
				size = 8
			case msgpcode.FixExt8:
				size = 9
			case msgpcode.FixExt16:
				size = 17
			case msgpcode.Str8, msgpcode.Bin8, msgpcode.Ext8:
				head = 1
			case msgpcode.Str16, msgpcode.Bin16, msgpcode.Ext16, msgpcode.Array16, msgpcode.Map16:
				head = 2
			case msgpcode.Str32, msgpcode.Bin32, msgpcode.Ext32, msgpcode.Array32, msgpcode.Map32:
				head = 4
			default:
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
